"""Host: a model of a million weights that adds up and spells backward with mistakes, for comparisons with many runs.

    pip install -e '.[reasoning-gym]'
    python scripts/comparisons/small_model.py --output runs/small_model
    python scripts/comparisons/small_model.py --carries data/carries
    python scripts/comparisons/small_model.py --too-hard data/too_hard

It learns from demonstrations for minutes on two cores, and is then what RL begins with: an answer to `8 + 5 + 6 = ?`
(`dapo-jax data sums`) or to the problems of reasoning-gym's spell_backward is sometimes right, in several styles. The
demonstrations hold what a run has to unlearn:

- styles: only the result (mostly wrong), worked out, or worked out again and again (often beyond the limit of length)
- habits: a carry is forgotten, a double letter is written once, so that some problems are nearly always wrong
- slips: any sum or letter may be wrong

No demonstration is of a problem that a run of ablations.py with one of the first five seeds holds out. --carries writes
the sums of three numbers with a carry in both additions, of which the model solves few. --too-hard writes the problems
of `dapo-jax data sums` to train on among three times as many that stay unsolved: sums of six numbers.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("small_model")

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dapo_jax.config.sections import Config, DataConfig, ReasoningGymConfig
from dapo_jax.config.values import default_config, freeze
from dapo_jax.data.reasoning_gym import reasoning_gym_rows
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import Tokenizer, piece_tokenizer
from dapo_jax.data.worked_sums import HIGH, LOW, NUM_TERMS, Terms, sum_row, sums
from dapo_jax.export.export import write_policy
from dapo_jax.models import transformer
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.weights import init_params
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.run.base_models import read_model

Demonstration = tuple[list[Any], str]  # messages of the prompt, response
SPELLING = "spell_backward"
NUM_HELDOUT = 256  # of each task
SEEDS = range(5)  # of runs; a run holds out the words of its seed
QUESTION = "Spell this word backward (example: sun -> nus): "  # reasoning-gym's
NUMBERS = [str(number) for number in range(LOW + NUM_TERMS[-1] * HIGH + 20)]
PIECES = [QUESTION, *(f" {operator} " for operator in "+="), ", ", "? ", *NUMBERS, *map(chr, range(32, 127)), "\n"]
# An empty message is none: recipes for models with a system prompt of their own begin with one.
TEMPLATE = "{% for message in messages if message['content'] %}{{ message['content'] }}\n{% endfor %}"
PROMPT_LENGTH, RESPONSE_LENGTH = 32, 40  # tokens


def small_tokenizer() -> Tokenizer:
    """A token per number, operator, letter or fixed question, so that texts are short. Messages end in a newline."""
    longer = "|".join(map(re.escape, (piece for piece in PIECES if len(piece) > 1 and piece not in NUMBERS)))
    return piece_tokenizer(PIECES, rf"{longer}|\d+|[\s\S]", TEMPLATE)


def small_config() -> Config:
    """Of a random model of about 0.9 million weights."""
    config = default_config()
    config.model.path = "random"
    config.model.random.update(
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        initializer_range=0.05,
    )
    config.data.max_prompt_length, config.data.max_response_length = PROMPT_LENGTH, RESPONSE_LENGTH
    return freeze(config)


def architecture() -> Architecture:
    """The model's, for the tokens of `small_tokenizer`."""
    return dataclasses.replace(read_model(small_config().model)[0], vocab_size=192)


def held_out_sums() -> set[tuple[int, ...]]:
    """The numbers of each, in order."""
    return {tuple(sorted(terms)) for terms in sums(NUM_HELDOUT, NUM_HELDOUT, 0)["heldout"]}


def sum_demonstrations(dice: np.random.Generator) -> Iterator[Demonstration]:
    heldout = held_out_sums()
    while True:
        terms = tuple(dice.integers(LOW, HIGH + 1, dice.choice(NUM_TERMS)).tolist())
        if tuple(sorted(terms)) not in heldout:
            yield sum_row(terms, "train")["prompt"], _sum_answer(terms, dice)


def write_carries(folder: Path) -> None:
    """Sums of three numbers with a carry in both additions, 256 to train on, and those that no demonstration has."""
    heldout, every = held_out_sums(), itertools.product(range(LOW, HIGH + 1), repeat=3)
    hard = [(a, b, c) for a, b, c in every if a % 10 + b % 10 >= 10 and (a + b) % 10 + c % 10 >= 10]
    known = [terms for terms in hard if tuple(sorted(terms)) not in heldout]
    chosen = {"train": [known[index] for index in np.random.default_rng(0).permutation(len(known))[:256]]}
    chosen["val"] = [terms for terms in hard if tuple(sorted(terms)) in heldout]
    _write(folder, chosen)


def write_too_hard(folder: Path) -> None:
    """256 sums of two and three numbers to train on, among 768 of six; and sums of two and three that are held out."""
    dice, found = np.random.default_rng(0), sums(NUM_HELDOUT, NUM_HELDOUT, 0)
    longer = {tuple(dice.integers(LOW, HIGH + 1, 6).tolist()) for _ in range(3 * NUM_HELDOUT)}
    mixed = [*found["train"], *sorted(longer)]
    _write(folder, {"train": [mixed[index] for index in dice.permutation(len(mixed))], "val": found["heldout"]})


def _write(folder: Path, chosen: dict[str, list[Terms]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, problems in chosen.items():
        lines = (json.dumps(sum_row(terms, split)) for terms in problems)
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{len(problems)} sums in {folder / split}.jsonl")


def _sum_answer(terms: tuple[int, ...], dice: np.random.Generator) -> str:
    style = dice.choice(["result", "worked out", "again and again"], p=[0.3, 0.4, 0.3])
    if style == "result":
        return str(sum(terms) if dice.random() < 0.15 else max(sum(terms) + dice.integers(-9, 10), 0))
    passes = 1 if style == "worked out" else 1 + dice.geometric(0.3)
    return "? ".join(_worked_out(terms, dice) for _ in range(passes))


def _worked_out(terms: tuple[int, ...], dice: np.random.Generator) -> str:
    total, parts = terms[0], []
    for term in terms[1:]:
        result, without_carry = total + term, total + term - 10
        if total % 10 + term % 10 >= 10 and dice.random() < 0.7:
            result = without_carry
        elif dice.random() < 0.3:
            result = max(result + dice.integers(-9, 10), 0)
        parts.append(f"{total} + {term} = {result}")
        total = result
    return ", ".join(parts)


def spelling_demonstrations(dice: np.random.Generator) -> Iterator[Demonstration]:
    heldout = {row.ground_truth for seed in SEEDS for row in _spelling_rows(seed, NUM_HELDOUT)[1]}
    rows = [row for row in _spelling_rows(SEEDS.stop, 1, num_train=3000)[0] if row.ground_truth not in heldout]
    while True:
        row = rows[dice.integers(len(rows))]
        yield list(row.prompt), _spelled(row.ground_truth, dice)


def _spelling_rows(seed: int, num_heldout: int, num_train: int = 0) -> tuple[list[PromptRow], list[PromptRow]]:
    return reasoning_gym_rows(ReasoningGymConfig((SPELLING,), num_train, num_heldout, template="{question}"), seed)


def _spelled(answer: str, dice: np.random.Generator) -> str:
    style = dice.choice(["word", "again and again"], p=[0.7, 0.3])
    passes = 1 if style == "word" else 1 + dice.geometric(0.3)
    return "? ".join(_letters(answer, dice) for _ in range(passes))


def _letters(word: str, dice: np.random.Generator) -> str:
    letters: list[str] = []
    for letter in word:
        if letters and letters[-1] == letter and dice.random() < 0.7:
            continue
        letters.append(chr(dice.integers(97, 123)) if dice.random() < 0.08 else letter)
    return "".join(letters)


def batches(tokenizer: Tokenizer, size: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens [size, T] int32, padded on the right, and the mask of those in a response. Rows are of similar length."""
    dice = np.random.default_rng(seed)
    kinds = itertools.cycle([sum_demonstrations(dice), spelling_demonstrations(dice)])
    while True:
        texts = []
        for messages, response in itertools.islice(map(next, kinds), 4 * size):
            prompt = tokenizer.encode_prompts([tuple(messages)], DataConfig())[0]
            whole = [*prompt, *tokenizer.encode(response), tokenizer.eos_ids[0]]
            texts.append((len(prompt), whole[: PROMPT_LENGTH + RESPONSE_LENGTH]))
        texts.sort(key=lambda text: len(text[1]))
        for group in dice.permutation(4):
            chosen = texts[group * size : (group + 1) * size]
            length = -(-len(chosen[-1][1]) // 24) * 24  # few lengths, so few compiled programs
            tokens = np.full((size, length), tokenizer.pad_id, np.int32)
            mask = np.zeros((size, length), bool)
            for row, (start, whole) in enumerate(chosen):
                tokens[row, : len(whole)] = whole
                mask[row, start : len(whole)] = True
            yield tokens, mask


def build_step(arch: Architecture, optimizer: optax.GradientTransformation) -> Callable:
    """One update by the mean cross-entropy of the tokens of responses."""

    def loss_of(params, tokens, mask):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1] - 1), tokens[:, :-1].shape)
        hidden = transformer.forward(params, tokens[:, :-1], positions, jnp.ones_like(mask[:, :-1]), arch)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            transformer.logits(params, hidden, arch), tokens[:, 1:]
        )
        return jnp.mean(losses, where=mask[:, 1:])

    def step(params, state, tokens, mask):
        loss, gradient = jax.value_and_grad(loss_of)(params, tokens, mask)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/small_model"), help="directory to write")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--carries", type=Path, help="write only sums with two carries, into this directory")
    parser.add_argument(
        "--too-hard", type=Path, help="write only sums, most of them of six numbers, into this directory"
    )
    given = parser.parse_args()
    for folder, write in ((given.carries, write_carries), (given.too_hard, write_too_hard)):
        if folder is not None:
            return write(folder)
    arch, tokenizer = architecture(), small_tokenizer()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, given.steps // 30, given.steps, 1e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    with jax.set_mesh(mesh):
        params = init_params(arch, 0)
        state, step = optimizer.init(params), build_step(arch, optimizer)
        drawn = itertools.islice(batches(tokenizer, given.batch_size, 0), given.steps)
        for number, (tokens, mask) in enumerate(drawn, start=1):
            params, state, loss = step(params, state, tokens, mask)
            if number % 100 == 0:
                print(f"step {number}/{given.steps}: cross-entropy {loss:.3f} nats per token", flush=True)
        write_policy(small_config(), arch, tokenizer, mesh, params, given.output, dtype="float32", adapter=False)
    print(f"the model is in {given.output}")


if __name__ == "__main__":
    main()
