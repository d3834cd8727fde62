"""A dozen ways to sample small models, whose tokens an earlier engine has left in data/waves.npz."""

from pathlib import Path
from typing import Any

import numpy as np
from rollout.small_rollouts import SAMPLES, Rollouts, dense
from rollout.test_windows import NAMES, family
from shapes import mesh_of

from dapo_jax.data.containers import Rollout
from dapo_jax.rollout.responses import Begun
from dapo_jax.rollout.sampling import Sampling

RECORDED = Path(__file__).parent / "data" / "waves.npz"
WAYS = {"free": (1.0, 1.0, -1), "greedy": (0.0, 1.0, -1), "filtered": (0.7, 0.9, 20), "long": (1.0, 1.0, -1, 12)}
CASES = [*WAYS, "eight devices", "one sample", "limits", "begun", *NAMES]


def rollouts_of(case: str) -> Rollouts:
    return family(case) if case in NAMES else dense()


def sampled(kind: str, case: str) -> Rollout:
    rollouts, options = rollouts_of(case), {}
    rows = np.arange(len(rollouts.prompts) * SAMPLES)
    if case in WAYS:
        options["sampling"] = Sampling.create(*WAYS[case])
    elif case == "one sample":
        options["num_samples"] = 1
    elif case == "limits":
        options["limits"] = rows % 40 + 1
    elif case == "begun":
        options |= begun_case(rollouts, rows)
    mesh = mesh_of((2, 2, 2)) if case == "eight devices" else None
    return rollouts.sample(rollouts.engine(kind, mesh, lookahead=1), **options)


def begun_case(rollouts: Rollouts, rows: np.ndarray) -> dict[str, Any]:
    """Responses of one sample each, which go on after 1 to 17 tokens."""
    lengths = rows % 17 + 1
    mask = np.arange(rollouts.length) < lengths[:, None]
    tokens = np.where(mask, 5 + (rows[:, None] + np.arange(rollouts.length)) % 50, 0).astype(np.int32)
    parts = Rollout(tokens, mask, np.zeros(mask.shape, np.float32), np.zeros(len(rows), bool))
    return {
        "prompts": [rollouts.prompts[row // SAMPLES] for row in rows],
        "numbers": rows // SAMPLES,
        "num_samples": 1,
        "begun": Begun(rows % SAMPLES, parts),
        "limits": np.minimum(lengths + 20, rollouts.length),
    }
