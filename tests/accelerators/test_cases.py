"""The table of cases misses nothing that the package compiles. Needs no compiler."""

import ast
from pathlib import Path

import dapo_jax

PACKAGE = Path(dapo_jax.__file__).parent
# How many functions each file compiles, all of which programs.py lowers. A new one needs a case; then count it here.
COMPILED = {
    "rollout/sampling.py": 1, "rollout/decoding.py": 4, "rewards/reward_model.py": 1, "rewards/assembly.py": 2,
    "dynamic_sampling/group_filter.py": 1, "policies.py": 1, "learner/critic.py": 2, "learner/update.py": 1,
    "learner/actor.py": 3, "learner/trainable.py": 5, "models/weights.py": 1, "run.py": 1, "training_batch.py": 6,
}  # fmt: skip


def test_every_function_that_is_compiled_has_a_case():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        uses = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        count = sum(ast.unparse(node) == "jax.jit" for node in uses)
        if count:
            found[path.relative_to(PACKAGE).as_posix()] = count
    assert found == COMPILED
