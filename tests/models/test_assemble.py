import dataclasses
import weakref
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models.assemble import StoredTensor, assemble, tensor_names
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.weights import weight_table

ARCH = read_architecture(Path(__file__).parent / "data" / "qwen2_bias_tied")
SOURCE = Path("model")


def hf_name(weight):
    return weight.hf_name


def stored_tensors(log=None):
    """Every tensor of ARCH, filled with its place in the table; `log` gets the names of those read."""
    tensors = {}

    def read(name, shape, value):
        if log is not None:
            log.append(name)
        return np.full(shape, value, np.float16)

    for weight in weight_table(ARCH):
        for name in tensor_names(weight, hf_name(weight)):
            tensors[name] = StoredTensor(weight.hf_shape, partial(read, name, weight.hf_shape, len(tensors)))
    return tensors


def test_layers_are_stacked_in_order_and_projections_transposed():
    tensors = stored_tensors()
    matrices = np.random.default_rng(0).normal(size=(3, ARCH.num_heads * ARCH.head_dim, ARCH.hidden_size))
    for layer, matrix in enumerate(matrices):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        tensors[name] = StoredTensor(matrix.shape, lambda matrix=matrix: matrix.astype(np.float32))
    query = assemble(SOURCE, ARCH, tensors, hf_name, lambda weight, array: array)["layers"]["query"]
    head, size = 2, 5
    row = head * ARCH.head_dim + size
    np.testing.assert_array_equal(query[:, :, head, size], matrices[:, row].astype(np.float32))


def test_the_host_holds_one_leaf_at_a_time_in_float32():
    log, previous = [], []

    def place(weight, array):
        assert (array.shape, array.dtype) == (weight.shape, np.float32)
        assert all(reference() is None for reference in previous), "an earlier leaf is still on the host"
        names = tensor_names(weight, hf_name(weight))
        assert log == names, "tensors of another leaf were read"
        log.clear()
        previous.append(weakref.ref(array))
        return jnp.array(array, copy=True)

    assemble(SOURCE, ARCH, stored_tensors(log), hf_name, place)
    assert len(previous) == len(weight_table(ARCH)) and log == []


def test_missing_unknown_and_misshapen_tensors_are_reported_together_and_nothing_is_read():
    log = []
    tensors = stored_tensors(log)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = StoredTensor((47,), tensors["model.norm.weight"].read)
    tensors["model.layers.0.mlp.extra.weight"] = StoredTensor((2, 2), tensors["model.norm.weight"].read)
    with pytest.raises(ValueError) as error:
        assemble(SOURCE, ARCH, tensors, hf_name, lambda weight, array: array, problems=["found before"])
    assert str(error.value).endswith(
        ": found before; "
        "tensor model.layers.1.mlp.up_proj.weight of shape (80, 48) is missing; "
        "tensor model.norm.weight has shape (47,), expected (48,); "
        "tensor model.layers.0.mlp.extra.weight of shape (2, 2) is unknown"
    )
    assert log == []


def test_at_most_ten_problems_are_listed():
    with pytest.raises(ValueError) as error:
        assemble(SOURCE, ARCH, {}, hf_name, lambda weight, array: array)
    names = [name for weight in weight_table(ARCH) for name in tensor_names(weight, hf_name(weight))]
    assert str(error.value).count(" is missing") == 10
    assert str(error.value).endswith(f"; and {len(names) - 10} more")


def test_unused_tensors_must_still_have_the_expected_shape():
    unused = {"lm_head.weight": (160, 48)}
    head = StoredTensor((160, 48), lambda: pytest.fail("read"))
    tensors = stored_tensors() | {"lm_head.weight": head}
    assert "head" not in assemble(SOURCE, ARCH, tensors, hf_name, lambda weight, array: array, unused=unused)
    tensors["lm_head.weight"] = dataclasses.replace(head, shape=(160, 47))
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \(160, 47\), expected \(160, 48\)"):
        assemble(SOURCE, ARCH, tensors, hf_name, lambda weight, array: array, unused=unused)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_value_that_is_not_finite_is_refused_with_its_tensor(value, name):
    tensors = stored_tensors()
    damaged = tensors[name].read()
    damaged.flat[3] = value
    tensors[name] = StoredTensor(damaged.shape, lambda: damaged)
    with pytest.raises(ValueError, match=f"model: 1 of {damaged.size} values of tensor {name} are NaN or infinite: "):
        assemble(SOURCE, ARCH, tensors, hf_name, lambda weight, array: array)
