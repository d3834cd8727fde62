"""Gradients of every checkpoint against transformers', which write_references.py recorded."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.checkpoints import DATA, NAMES, loss, model
from models.write_references import RANK, SCALE, adapter, projected, sequences

from dapo_jax.models.lora import Lora, adapter_table, present_targets, with_adapters
from dapo_jax.models.weights import UNTRAINED, unflatten, weight_table
from dapo_jax.models.write_safetensors import as_stored


def stored(table, tree):
    """The tensors of a tree of leaves by their names in a checkpoint, as they are stored there."""
    for _, weights in itertools.groupby(table, lambda weight: weight.hf_name):
        first, *others = weights
        leaves = [
            np.asarray(functools.reduce(lambda part, key: part[key], weight.path, tree)) for weight in (first, *others)
        ]
        yield from zip(first.tensors, as_stored(first, leaves, np.dtype(np.float32)), strict=True)


def assert_same_gradients(found, golden, prefix):
    """Within 1e-4 of the largest number of the projections of all tensors.

    Of a recurrent model the expected ones are exact: within twice the distance of transformers' in float32, if larger.
    """
    expected = {name.removeprefix(prefix): golden[name] for name in golden.files if name.startswith(prefix)}
    assert found.keys() == expected.keys()
    largest = max(np.abs(numbers).max() for numbers in expected.values())
    assert largest > 0.01
    tolerance = max(1e-4 * largest, 2 * float(golden.get(f"error of {prefix}", 0.0)))
    for name, gradient in found.items():
        np.testing.assert_allclose(projected(name, gradient), expected[name], rtol=0, atol=tolerance, err_msg=name)


# Short: of adapters, the dense model with the most traits. Long: each model has one of the two gradients, and models
# that share a trait (experts, windows, norms, biases, scaled positions) have different ones.
@pytest.mark.slow
@pytest.mark.long("moe", "olmo3", "gemma2", "smollm3", "biases", "yarn", "qwen2_window")
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_all_weights_equal_those_of_transformers(name):
    arch, params = model(name)
    tokens = sequences(arch.vocab_size)
    gradient = jax.jit(jax.grad(loss), static_argnums=3)(params, tokens, np.ones(tokens.shape, bool), arch)
    golden, found = np.load(DATA / name / "transformers.npz"), dict(stored(weight_table(arch), gradient))
    untrained = [tensor for weight in weight_table(arch) if weight.path[-1] in UNTRAINED for tensor in weight.tensors]
    assert not any(found.pop(tensor).any() for tensor in untrained)
    assert_same_gradients(found, golden, "weight ")


@pytest.mark.short("gemma3")
@pytest.mark.long("moe_mixed", "olmo2", "mistral", "qknorm", "qwen2_bias", "llama3", "llama_tied")
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_adapters_equal_those_of_transformers(name):
    arch, params = model(name)
    lora = Lora(RANK, SCALE * RANK, present_targets(arch))
    table = adapter_table(arch, lora)
    adapters = unflatten((weight, leaf_of_adapters(weight)) for weight in table)

    @jax.jit
    def gradients(params, adapters, tokens):
        mask = jnp.ones(tokens.shape, bool)
        return jax.grad(lambda adapters: loss(with_adapters(params, adapters, lora, jnp.float32), tokens, mask, arch))(
            adapters
        )

    found = dict(stored(table, gradients(params, adapters, sequences(arch.vocab_size))))
    found = {name.removeprefix("base_model.model."): gradient for name, gradient in found.items()}
    assert_same_gradients(found, np.load(DATA / name / "transformers.npz"), "lora ")


def leaf_of_adapters(weight):
    """A leaf of adapters with the values that write_references.py gave them."""
    names = (name.removeprefix("base_model.model.") for name in weight.tensors)
    return np.stack([adapter(name, weight.hf_shape).T for name in names]).reshape(weight.shape)
