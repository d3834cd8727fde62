"""The small checkpoints of tests/models/data."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.models.transformer import forward, logits, positions_of

DATA = Path(__file__).parent / "data"
NAMES = sorted(path.name for path in DATA.iterdir())


def place(weight, array):
    """A leaf stays a NumPy array, so that taking parameters apart compiles nothing."""
    return array


@functools.cache
def model(name):
    """Architecture and parameters."""
    arch = read_architecture(DATA / name)
    return arch, load_params(DATA / name, arch, place)


def tolerance(name):
    """Of logits: 1e-4; of a recurrent model twice what transformers' own are away from exact ones, if that is more."""
    reference, expected = np.load(DATA / name / "reference.npz"), expected_logits(DATA / name)
    mask = reference["attention_mask"] > 0
    return max(1e-4, 2 * float(np.abs(reference["logits"] - expected)[mask].max()))


def expected_logits(directory):
    """Of reference.npz; of a recurrent model exact ones."""
    path = directory / "transformers.npz"
    exact = np.load(path).get("exact") if path.exists() else None
    return np.load(directory / "reference.npz")["logits"] if exact is None else exact


def loss(params, tokens, mask, arch, remat="none"):
    """Mean negative log-probability of the next token, over all positions."""
    scores = logits(params, forward(params, tokens, positions_of(mask), mask, arch, remat=remat), arch)[:, :-1]
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), tokens[:, 1:, None], axis=-1).mean()


@functools.partial(jax.jit, static_argnames="arch")
def score(params, tokens, mask, arch):
    """Logits [B, T, V]."""
    return logits(params, forward(params, tokens, positions_of(mask), mask, arch), arch)
