"""Every checkpoint samples greedily as transformers does, with pages and stretches, on one device and on eight."""

import itertools
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from models.checkpoints import tolerance
from models.write_references import NEW, prompts
from rollout.small_rollouts import GREEDY
from shapes import mesh_of
from small_policy import engine_settings

from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.learner.decode_weights import build_decode_weights
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.parallel.sharding import TRAIN_RULES, place_weight
from dapo_jax.rollout.engine import Engine
from dapo_jax.rollout.responses import Request
from dapo_jax.rollout.sampling import TRAIN

DATA = Path(__file__).parents[1] / "models" / "data"
NAMES = sorted(path.name for path in DATA.iterdir())
EVERY_WAY = ("gemma3", "qwen3_moe")  # the others with stretches on one device, and with pages on eight
ONE = (1, 1, 1)
KINDS = {"pages": attend_gathered, "stretches": None}
SMOLLM2 = Path(os.environ.get("DAPO_JAX_CACHE", "~/.cache/dapo_jax")).expanduser() / "SmolLM2-135M-Instruct"
TEXTS = ["The capital of France is", "1 2 3 4 5 6", "Once upon a time, in a village,", "def fibonacci(n):", "Water"]


def sampled(path, kind, shape, given, num_samples=1, **settings):
    mesh, arch = mesh_of(shape), read_architecture(path)
    params = load_params(path, arch, place_weight(mesh, TRAIN_RULES))
    settings = {"arch": arch, "eos_ids": (arch.vocab_size,), "pad_id": 0, "chunk_length": 8, **settings}
    with jax.set_mesh(mesh):
        weights = build_decode_weights(arch, np.dtype("float32"), mesh)(params)
        built = Engine(engine_settings(mesh, **settings), KINDS[kind])
        try:
            numbers = range(len(given))
            return built.generate(given, numbers, Request(weights, num_samples, TRAIN, GREEDY))
        finally:
            built.close()


def lane(name, kind, shape):
    """The long lane has each kind of layer in one way, by turns: stretches on one device, or pages on eight."""
    if (name, kind, shape) == ("gemma3", "pages", (2, 2, 2)):
        return ()
    if name in ("llama_tied", "qwen3_qknorm", "olmo2", "qwen3_moe"):  # what they have, others have as well
        return pytest.mark.full
    usual = (kind == "stretches") == (shape == ONE) and (NAMES.index(name) % 2 == 0) == (kind == "stretches")
    return pytest.mark.slow if usual else pytest.mark.full


CASES = [
    pytest.param(name, kind, shape, id=f"{name}-{kind}-{shape}", marks=lane(name, kind, shape))
    for name, kind, shape in itertools.product(NAMES, KINDS, (ONE, (2, 2, 2)))
    if name in EVERY_WAY or (kind == "stretches") == (shape == ONE)
]


@pytest.mark.parametrize(("name", "kind", "shape"), CASES)
def test_greedy_tokens_and_their_log_probabilities_are_those_of_transformers(name, kind, shape):
    """Prompts of 40, 3 and 21 tokens. Windows are of 16 tokens, chunks of 8."""
    num_samples, given = 1 if shape == ONE else 2, prompts(read_architecture(DATA / name).vocab_size)
    lengths = {"max_prompt_length": 40, "max_response_length": NEW}
    found = sampled(DATA / name, kind, shape, given, num_samples, **lengths)
    golden = np.load(DATA / name / "transformers.npz")
    expected, logprobs = (golden[key].repeat(num_samples, axis=0) for key in ("responses", "logprobs"))
    np.testing.assert_array_equal(found.responses, expected)
    np.testing.assert_allclose(found.logprobs, logprobs, rtol=0, atol=tolerance(name))


@pytest.mark.slow
@pytest.mark.long("llama3_rope_scaled", "qwen2_bias_tied")
@pytest.mark.parametrize("name", ["llama3_rope_scaled", "llama_tied", "qwen2_bias_tied", "qwen3_qknorm"])
def test_greedy_responses_that_may_end_are_those_of_transformers(name):
    """data/greedy.npz: transformers' generate(do_sample=False) on the same weights and prompts."""
    golden = np.load(Path(__file__).parent / "data" / "greedy.npz")
    given = [row[row >= 0].tolist() for row in golden[f"{name}_prompts"]]
    expected = golden[f"{name}_responses"]
    found = sampled(DATA / name, "stretches", ONE, given, eos_ids=(2,), max_response_length=expected.shape[1])
    np.testing.assert_array_equal(found.responses, expected)


@pytest.mark.slow
def test_greedy_decoding_of_smollm2_equals_transformers():
    """Needs torch, transformers, accelerate and the model's file."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    pytest.importorskip("accelerate")
    if not SMOLLM2.exists():
        pytest.skip(f"{SMOLLM2} is missing: scripts/quickstart.sh downloads it")
    peer = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    tokenizer = load_tokenizer(SMOLLM2)
    given = [tokenizer.encode(text) for text in TEXTS]
    ends = {"eos_ids": tokenizer.eos_ids, "pad_id": tokenizer.pad_id}
    found = sampled(SMOLLM2, "stretches", ONE, given, max_prompt_length=16, max_response_length=NEW, **ends)
    for prompt, tokens, mask in zip(given, found.responses, found.mask, strict=True):
        expected = peer.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=list(tokenizer.eos_ids),
            pad_token_id=tokenizer.pad_id,
        )[0, len(prompt) :].tolist()
        assert tokens[mask].tolist() == expected
