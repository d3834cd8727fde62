"""Host: how fast the policy is updated, compared with TRL's GRPOTrainer (torch) and Tunix's GRPO learner.

    python scripts/benchmarks/benchmark_update.py --repeats 3 --output update.json
    python scripts/benchmarks/benchmark_update.py --peers trl=TORCH_ENV/bin/python tunix=TUNIX_ENV/bin/python
    python scripts/benchmarks/benchmark_update.py --ours shared "kept=model.enable_gradient_checkpointing=False"
    python scripts/benchmarks/benchmark_update.py --lengths lognormal:median=24,sigma=1,clip=128

An update is the forward pass, backward pass and optimizer step (AdamW) of one mini-batch under DAPO's loss, on a random
Llama (default: the shape of SmolLM2-135M). Prompts are equally long; responses have --lengths. Each contender is a
separate process with the same prompts and responses. They take turns; only one computes at a time. A peer is left out
if its packages are not installed. Measured are:

    dapo_jax NAME  step.update on rows of the learner, under the config options that --ours gives NAME
    trl            a step of GRPOTrainer (loss_type "dapo") without _generate_and_score_completions: its training_step
                   calls, gradient clipping, optimizer and what its loop does around them
    tunix          all RLCluster.update_actor calls of a step, with DAPO's loss

Responses are given; nothing is sampled. As in training, the peers pad all of them to the longest, and dapo_jax packs
them unless an option says otherwise. The peers keep all activations; dapo_jax follows its options (the default
recomputes them). In bfloat16, weights and moments of dapo_jax and TRL (autocast) are float32, those of Tunix are not.

Columns: "tokens/s" counts prompt and response of every row, even if a prompt is run once for several rows, but no
padding. It is the median of the repeats after a first call, which compiles and takes "first s". "of the limit" compares
with the matrix products of these tokens alone, measured in dapo_jax in the same dtype and run: three times those of
forward passes, as many tokens at a time as a micro-batch has on average, with a prompt in every row and the head on
responses only. Shared prompts can exceed it. "MFU" is the FLOPs of these products divided by what the device's data
sheet promises in bfloat16. "peak" is the most memory that the process has taken.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("benchmark_update")

import argparse
import ast
import math
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from contenders import (
    device_limits,
    jax_peak,
    make_parser,
    seconds_of,
    serve,
    start_contenders,
    take_turns,
    write_output,
)
from peer_trainers import LEARNING_RATE, MANY, TRL, Tunix, integer_tokenizer
from random_models import config_json, forward_products
from workload import (
    LENGTHS,
    as_numbers,
    as_text,
    make_lengths,
    make_prompts,
    make_responses,
    num_tokens,
    rows_of_responses,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from markdown_table import markdown_table
from script_ends import command


def open_random_run(stack: ExitStack, args: argparse.Namespace, dtype: str, options: dict[str, Any]) -> Any:
    """A Run of dapo_jax on a random model of the shape, under DAPO's defaults and `options`."""
    import jax

    from dapo_jax.command.validation import validate
    from dapo_jax.config.values import default_config, freeze
    from dapo_jax.data.prompts import PromptOrder, PromptSet
    from dapo_jax.data.rows import PromptRow
    from dapo_jax.data.tokenizer import Tokenizer
    from dapo_jax.models.hf_architecture import architecture_from_hf
    from dapo_jax.parallel.mesh import Meshes, make_mesh
    from dapo_jax.parallel.stopping import Pace
    from dapo_jax.run.networks import build_learner
    from dapo_jax.run.parts import Run, build_held_out, open_monitor, open_rewards, open_sampler
    from dapo_jax.run.problems import Problems
    from dapo_jax.run.settings import engine_settings

    num_prompts = args.batch // args.group
    values = default_config()
    values.update_from_flattened_dict(
        {
            "model.path": "random",
            "model.dtype": dtype,
            "data.task": "arithmetic",
            "data.train_batch_size": num_prompts,
            "data.max_prompt_length": max(args.prompt_length, 16),
            "data.max_response_length": int(make_lengths(args).max()),
            "rollout.n": args.group,
            "rollout.max_num_seqs": args.batch,
            "reward.function": "peer_trainers.score",
            "algorithm.filter_groups.metric": "score",
            "algorithm.filter_groups.max_num_gen_batches": 1,
            "algorithm.filter_groups.on_limit": "fallback_unfiltered",
            "actor.ppo_mini_batch_size": num_prompts,
            "actor.ppo_micro_batch_size_per_device": max(args.micro // jax.device_count(), 1),
            "actor.old_logprob": "rollout",
            "actor.optim.lr": LEARNING_RATE,
            "trainer.compilation_cache_dir": "",
            "trainer.total_training_steps": MANY,
            **options,
        }
    )
    config = freeze(values)
    validate(config)
    arch, prompts = architecture_from_hf(config_json(args.shape)), make_prompts(args)
    tokenizer = Tokenizer(integer_tokenizer(arch.vocab_size), (), 0, {}, False, None)
    rows = [PromptRow(text, "benchmark", "", {}) for text in as_text(prompts)]
    order = PromptOrder(num_prompts, seed=0, shuffle=False)
    problems = Problems(PromptSet(rows, prompts), (), order, config.reward.function)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    stack.enter_context(jax.set_mesh(mesh))
    monitor = stack.enter_context(open_monitor(config, initial_step=0))
    settings = engine_settings(config, arch, tokenizer.eos_ids, tokenizer.pad_id, mesh)
    rewards = stack.enter_context(open_rewards(config, problems, tokenizer, mesh, monitor))
    sampler = stack.enter_context(open_sampler(settings, tokenizer, config.rollout.stop, monitor.stage))
    learner = build_learner(config, arch, tokenizer, Meshes(mesh, mesh), monitor, Pace(lambda: None))
    held_out = build_held_out(config.evaluate, config.monitor, problems, sampler, rewards, shown=False)
    return Run(config, arch, problems, sampler, rewards, learner, held_out, monitor)


class Ours:
    """dapo_jax."""

    def __init__(self, args: argparse.Namespace, dtype: str, options: dict[str, Any]) -> None:
        import jax

        from dapo_jax.training.state import first_state

        self.jax, self.args, self.stack = jax, args, ExitStack()
        self.run = open_random_run(self.stack, args, dtype, options)
        state = first_state(self.run)
        self.models, self.progress, self.stream = state.models, state.progress, state.stream
        self.batch: Any = None

    def __call__(self, case: str) -> tuple[int, float]:
        from dapo_jax.learner.learner import update
        from dapo_jax.run.settings import learning_rates

        self.batch = self.batch or self._make_batch()
        learner = self.run.learner
        rates = learning_rates(self.run.learner.batching.trained, self.run.config.trainer, MANY // 2)
        start = time.perf_counter()
        self.models, finish = update(learner, self.models, self.batch, rates)
        finish()
        self.jax.block_until_ready(self.models)
        return num_tokens(self.args), time.perf_counter() - start

    def _make_batch(self) -> Any:
        import dataclasses

        lengths, prompts = make_lengths(self.args), self.run.problems.train_set.tokens
        mask = np.arange(lengths.max()) < lengths[:, None]
        responses = np.zeros(mask.shape, np.int32)
        responses[mask] = np.concatenate(make_responses(self.args))
        logprobs = np.where(mask, -math.log(self.run.arch.vocab_size), 0.0)
        grouped = (array.reshape(len(prompts), self.args.group, -1) for array in (responses, mask, logprobs))
        batch = rows_of_responses(self.run, prompts, *grouped)
        advantages = np.random.default_rng(6).normal(size=(len(batch.mask), 1)) * batch.mask
        return dataclasses.replace(batch, advantages=advantages.astype(np.float32))

    def limit(self, case: str) -> dict[str, float | None]:
        """Tokens per second of the matrix products alone, and at the speed of the data sheet."""
        peak, tokens = device_limits().of_dtype(self.run.config.model.dtype).flops, num_tokens(self.args)
        seconds = (
            least_flops(self.run.arch, self.args) / (peak * self.run.learner.mesh.size) if peak is not None else None
        )
        weights = self.run.learner.networks.decode_weights(self.models.actor.params)
        return {
            "limit": tokens / least_seconds(self.run, weights, self.args),
            "at peak": tokens / seconds if seconds is not None else None,
        }

    def peak(self) -> float:
        """Bytes."""
        return jax_peak(self.jax)


def least_seconds(run: Any, weights: Any, args: argparse.Namespace) -> float:
    """Seconds of the matrix products of an update: three times those of forward passes over its tokens.

    Args:
        weights: decoding weights.
    """
    import jax
    import jax.numpy as jnp

    from dapo_jax.parallel.mesh import num_batch_shards

    shards = num_batch_shards(run.learner.mesh)
    share = max(args.micro // shards, 1) / args.batch  # every device computes one device's part of the rows
    products = jax.jit(forward_products, static_argnums=2)
    rows, head_rows = round(share * num_tokens(args)), round(share * int(make_lengths(args).sum()))
    hidden = jnp.full((rows, run.arch.hidden_size), 1e-3, jnp.float32)
    times = [seconds_of(lambda: jax.block_until_ready(products(weights, hidden, head_rows))) for _ in range(5)]
    return 3 * statistics.median(times[2:]) / (share * shards)


def least_flops(arch: Any, args: argparse.Namespace) -> float:
    """FLOPs of the same products: 6 for each weight of a layer and token, and of the head and response token."""
    from dapo_jax.models.weights import weight_table

    layers = sum(math.prod(weight.shape) for weight in weight_table(arch) if weight.is_matrix and weight.stacked)
    head = arch.vocab_size * arch.hidden_size
    return 6.0 * (layers * num_tokens(args) + head * int(make_lengths(args).sum()))


def variants(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The options of each variant of dapo_jax, by its name."""
    found = {}
    for variant in args.ours:
        name, _, options = variant.partition("=")
        pairs = [option.split("=", 1) for option in options.split(",") if option]
        found[f"dapo_jax {name}"] = {key: _value(text) for key, text in pairs}
    return found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def measure(script: str, args: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """The rows of the table, and the versions of each contender's packages."""
    wanted = [(name, dtype) for dtype in args.dtypes for name in variants(args)]
    contenders = start_contenders(
        script, [*wanted, *((peer, args.dtypes[0]) for peer in ("trl", "tunix"))], args, arguments
    )
    try:
        results = take_turns(contenders, "", args.repeats)
        limits: dict[str, dict[str, Any]] = {}  # by dtype
        for contender in contenders:
            if contender.ours and contender.dtype not in limits:
                limits[contender.dtype] = contender.ask(case="", limit=True)
        rows = []
        for result in results:
            limit = limits[result.contender.dtype]
            row = result.row(results[0], limit["limit"])
            if "at peak" in limit:
                row["MFU"] = result.speed / limit["at peak"] if limit["at peak"] is not None else None
            rows.append(row)
    finally:
        for contender in contenders:
            contender.close()
    return {"versions": {contender.name: contender.versions for contender in contenders}, "rows": rows}


def run_benchmark(
    script: str, description: str | None, contenders: dict[str, type], arguments: Sequence[str] | None
) -> None:
    """The command line of a benchmark of `contenders`: "dapo_jax" and the peers."""
    parser = make_parser(description)
    parser.add_argument("--lengths", default="64", help=LENGTHS)
    parser.add_argument("--new-tokens", dest="lengths", metavar="N", help="the same as --lengths N")
    parser.add_argument("--micro", type=int, default=16, help="responses per forward and backward pass")
    parser.add_argument(
        "--ours",
        nargs="+",
        default=["shared", "plain=actor.share_prompts=False"],
        metavar="NAME[=KEY=VALUE,...]",
        help="variants of dapo_jax, by config options",
    )
    args = parser.parse_args(arguments)
    if args.serve:
        options = variants(args)
        serve(
            args.serve,
            lambda name, dtype: (
                contenders["dapo_jax"](args, dtype, options[name]) if name in options else contenders[name](args, dtype)
            ),
        )
        return
    given = [*(sys.argv[1:] if arguments is None else arguments), "--lengths", as_numbers(args.lengths, args)]
    found = measure(script, args, given)
    print(markdown_table(found["rows"], leave_out=("seconds",)))
    write_output(args, **found)


def main(arguments: Sequence[str] | None = None) -> None:
    run_benchmark(__file__, __doc__, {"dapo_jax": Ours, "trl": TRL, "tunix": Tunix}, arguments)


if __name__ == "__main__":
    command(main)
