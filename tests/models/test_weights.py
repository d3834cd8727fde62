import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
from models.checkpoints import DATA, NAMES
from safetensors.numpy import load_file

from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.weights import cast_matrices, count_params, init_params, unflatten, weight_table
from dapo_jax.parallel.sharding import TRAIN_RULES

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_heads": 6, "head_dim": 8}
ARCH = dataclasses.replace(shapes.ARCH, **SIZES, family="qwen2", qkv_bias=True, qk_norm="head", initializer_range=0.5)
jit_init = jax.jit(init_params, static_argnums=0)


@pytest.mark.parametrize("name", NAMES)
def test_table_names_every_tensor_of_the_checkpoint_and_its_shape(name):
    arch = read_architecture(DATA / name)
    expected = {}
    for weight in weight_table(arch):
        expected |= dict.fromkeys(weight.tensors, weight.file_shape)
        assert len(weight.axes) == len(weight.shape) and set(weight.axes) <= set(TRAIN_RULES)
    stored = load_file(DATA / name / "model.safetensors")
    assert expected == {name: tensor.shape for name, tensor in stored.items()}
    assert count_params(arch) == sum(tensor.size for tensor in stored.values())


def test_initial_values_follow_the_table():
    flat = _flat(jit_init(ARCH, 0))
    assert set(flat) == {weight.path for weight in weight_table(ARCH)}
    for weight in weight_table(ARCH):
        leaf = flat[weight.path]
        assert leaf.shape == weight.shape and leaf.dtype == np.float32
        if weight.initializer == "normal":
            assert abs(leaf.std() - ARCH.initializer_range) < 0.03 and abs(leaf.mean()) < 0.05
        else:
            assert (leaf == (weight.initializer == "ones")).all()


def test_initial_values_depend_on_seed_leaf_and_layer_only():
    first, again, other = (_flat(jit_init(ARCH, seed)) for seed in (1, 1, 2))
    gate, up = first[("layers", "gate")], first[("layers", "up")]
    assert all((first[path] == again[path]).all() for path in first)
    assert (gate != other[("layers", "gate")]).all()
    assert (gate != up).all() and (gate[0] != gate[1]).all()


def test_casting_keeps_norms_biases_and_a_scalar_head_in_float32():
    arch = dataclasses.replace(ARCH, scalar_head=True)
    params = unflatten((weight, np.zeros(weight.shape, np.float32)) for weight in weight_table(arch))
    cast = jax.eval_shape(lambda params: cast_matrices(params, arch, jnp.bfloat16), params)
    dtypes = {key.key: leaf.dtype for (*_, key), leaf in jax.tree_util.tree_leaves_with_path(cast)}
    norms = {"attention_norm", "mlp_norm", "query_norm", "key_norm", "final_norm"}
    kept = {name for name, dtype in dtypes.items() if dtype == jnp.float32}
    assert kept == norms | {"query_bias", "key_bias", "value_bias", "score"}
    assert all(dtype == jnp.bfloat16 for name, dtype in dtypes.items() if name not in kept)


@pytest.mark.parametrize("tied", [True, False])
def test_a_scalar_head_takes_the_place_of_the_vocabularys(tied):
    scoring = dataclasses.replace(ARCH, tie_embeddings=tied, scalar_head=True)
    *trunk, score = weight_table(scoring)
    assert trunk == weight_table(dataclasses.replace(ARCH, tie_embeddings=True))
    assert (score.path, score.shape, score.axes) == (("score",), (32,), ("embed",))
    assert (score.hf_name, score.hf_shape, score.initializer) == ("score.weight", (1, 32), "zeros")


def _flat(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {tuple(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}
