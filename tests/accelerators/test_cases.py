"""The table of cases misses nothing that the package compiles. Needs no compiler."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from accelerators.cases import CASES, config_of
from accelerators.programs import wide_types

import dapo_jax
from dapo_jax.command.validation import validate

PACKAGE = Path(dapo_jax.__file__).parent
# How many functions each file compiles. programs.py lowers them, or the same function where it is made inside another
# (run/base_models.py), but for stretches.py, which is for CPUs. A new one needs a case; then count it here.
COMPILED = {
    "rollout/sampling.py": 2,
    "rollout/decoding.py": 3,
    "rollout/pages.py": 1,
    "rollout/stretches.py": 4,
    "rewards/reward_model.py": 1,
    "rewards/shaping.py": 3,
    "dynamic_sampling/group_filter.py": 1,
    "run/base_models.py": 1,
    "parallel/checksums.py": 1,
    "learner/critic.py": 2,
    "learner/update.py": 1,
    "learner/actor.py": 3,
    "learner/trainable.py": 6,
    "models/weights.py": 1,
    "models/grouped_products_gpu.py": 2,
    "learner/learner.py": 1,
    "learner/decode_weights.py": 1,
    "learner/batch.py": 5,
    "learner/trained_tokens.py": 1,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_config_of_a_case_is_valid(case, tmp_path):
    validate(config_of(case, tmp_path))


def test_every_function_that_is_compiled_has_a_case():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        count = sum(isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.jit" for node in nodes)
        taken = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax")]
        assert not {"jit", "pmap", "pjit"} & {alias.name for node in taken for alias in node.names}, path
        if count:
            found[path.relative_to(PACKAGE).as_posix()] = count
    assert found == COMPILED


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_what_computes_in_64_bits_is_found(dtype):
    def total(rows):
        with jax.enable_x64(True):
            start = jnp.zeros((), dtype)
            found, _ = jax.lax.scan(lambda sum, row: (sum + jnp.sum(row, dtype=dtype), None), start, rows)
        return found.astype(jnp.float32)

    def doubled(rows):
        with jax.enable_x64(True):
            return (rows.astype(dtype) + rows.astype(dtype)).astype(jnp.float32)

    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    assert wide_types(jax.jit(total).lower(shape).as_text())
    assert wide_types(jax.jit(doubled).lower(shape).as_text())
    drawn = jax.jit(lambda rows: rows.T @ jax.random.normal(jax.random.key(0), rows.shape))
    assert not wide_types(drawn.lower(shape).as_text())
