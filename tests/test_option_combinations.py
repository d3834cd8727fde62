"""Options together: each combination is refused with its reason, or trains alike however the run is cut and divided.

A step of it that is computed again (docs/reliability.md) is equal to the bit.

Where a token's ratio lies at the bound of the clip, or two tokens tie for a place among the highest, rounding decides
which is trained on, and two meshes may part. That such a run is one is shown, not assumed: on one device, weights that
differ by rounding part from it too. The combination must then pass with another seed. A mesh that loses part of a sum
parts from a run that such weights do not part from.

The commit decides which combinations are tried, or OPTION_COMBINATIONS=COUNT:SEED (scripts/test_combinations.sh).
"""

import fnmatch
import json
import math
import os
import random
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import small_run
import yaml
from config_problems import off_and_on
from ends_within import ends_within
from environments import played
from judge_server import Answer, judge_server
from reward_model_files import write_reward_model
from safetensors.numpy import load_file, save_file
from shapes import SMALL
from small_families import with_tokenizer
from small_run import (
    DAMPED,
    assert_same_checkpoint,
    assert_same_policy,
    copied,
    own_function,
    rounding_decides,
    rows_without_clock,
    small_config,
    sums,
)

from dapo_jax.command.option_uses import READS, unread
from dapo_jax.command.validation import validate
from dapo_jax.config.values import DEFAULTS
from dapo_jax.errors import InputError
from dapo_jax.learner import update
from dapo_jax.learner.optimizer import Models
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.run import meshes
from dapo_jax.run.base_models import read_architecture_of
from dapo_jax.tools.replay import replay
from dapo_jax.training.loop import train

TABLE = yaml.safe_load(Path(__file__).with_name("option_combinations.yaml").read_text())
VALUES, NEEDS, OF_LAYOUT, GIVEN_UP = (TABLE[name] for name in ("values", "needs", "of_layout", "given_up"))
RECIPE = {  # three steps, which end whatever the filter drops
    **DAMPED,
    "rollout.n": 4,
    "trainer.total_training_steps": 3,
    "trainer.test_freq": 3,
    "trainer.val_before_train": False,
    "trainer.save_freq": 1,
    "trainer.max_ckpt_to_keep": 9,
    "algorithm.filter_groups.max_num_gen_batches": 3,
    "algorithm.filter_groups.on_limit": "partial",
    "algorithm.filter_groups.on_empty": "skip_step",
}
LAYOUTS = (  # on eight devices
    {"mesh.fsdp": 2, "mesh.tensor": 2},
    {"mesh.fsdp": 4},
    {"mesh.tensor": 2},
    {"mesh.fsdp": 4, "mesh.context": 2},
)
OF_EXPERTS = {"mesh.fsdp": 2, "mesh.expert": 2}
LIMIT_S = 1200  # of a combination, which takes 5 to 150 seconds: only what hangs takes longer
SEEDS = 3  # with which a combination is tried, until rounding decides nothing
COUNT, SEED = map(int, os.environ.get("OPTION_COMBINATIONS", "9:0").split(":"))
if "OPTION_COMBINATIONS" not in os.environ:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    SEED = int(commit.stdout[:8] or "0", 16)


@pytest.fixture(scope="module")
def places(tmp_path_factory, whole):
    """What the places of the table stand for, and those of option_values.yaml."""
    files = tmp_path_factory.mktemp("files")
    (files / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(0, 1, 2, 3, 4, 5, 6)))
    (files / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(7, 8)))
    write_reward_model(files / "reward")
    own_function(
        files, "return {'score': len(solution) % 3 - 1.0, 'acc': float(ground_truth in solution or len(solution) % 2)}"
    )  # which finds some answers of a random model right
    for value in VALUES["model.path"]:
        if (family := value.removeprefix("{families}/")) != value:
            calm(with_tokenizer(family, files / "families"))
    of_models = {"models/teacher": str(whole[0]), "models/reward": str(files / "reward")}
    of_models |= {"{run}": str(whole[0]), "{families}": str(files / "families")}
    of_environments = {"lake.py:Lake": f"{played.__file__}:Parity", "lake.py": played.__file__}
    return {"{files}": str(files), "a.parquet": str(files / "rows.jsonl"), **of_models, **of_environments}


def calm(model: str) -> None:
    """Lowers how much a random model's gradients depend on rounding: norms of small numbers make it 10 times as much.

    Transformers leaves <pad> an embedding of zeros: a policy that draws it has gradients of 1e10.
    """
    config, file, name = Path(model) / "config.json", Path(model) / "model.safetensors", "model.embed_tokens.weight"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.01}))
    weights = load_file(file)
    weights[name][0] = weights[name][1:].mean(axis=0)
    save_file(weights, file)


@pytest.fixture(scope="module", autouse=True)
def judge():
    """A judge that says the same of a text each time."""
    with judge_server() as server:
        server.base_url = "http://localhost:8000/v1"
        server.rule = lambda prompt: Answer(f"Score: {sum(map(len, prompt.split())) % 6}")
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("number", range(COUNT), ids=lambda number: f"{SEED}-{number}")
def test_options_that_are_accepted_together_train_alike_cut_and_divided(number, tmp_path, places, monkeypatch):
    print(again(number))
    dice = random.Random(f"{SEED} {number}")
    changes = drawn(dice, places)
    while number % 2 and is_refused(tmp_path, changes):  # so that at least half of the combinations train
        changes = drawn(dice, places)
    print(command(changes))
    division = divisions(dice, changes)
    for again_with in range(SEEDS):
        with ends_within(LIMIT_S):
            if not check(changes, division, tmp_path / str(again_with), monkeypatch):
                return
        changes = changes | {"seed": 100 + again_with}
        print(f"Rounding decides what is trained on; again with seed={changes['seed']}.")
    pytest.fail(f"rounding decides with each of {SEEDS} seeds: these options make ties")


def check(
    changes: dict[str, Any], division: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AssertionError | None:
    """A run ends well or is refused; its replay, another that is cut, and one that is divided, are equal to it.

    Returns how the latter differs if it may, as rounding decides in this run.
    """
    use_one_device(monkeypatch)
    try:
        models = run(folder / "whole", changes)
    except InputError as refusal:
        print(refusal)
        return None
    rows, params = rows_of(folder / "whole"), jax.device_get(models.actor.params)
    assert [row["step"] for row in rows][-3:] == [1, 2, 3]
    assert [(row["step"], name) for row in rows for name, value in row.items() if not math.isfinite(value)] == []
    found = replay(folder / "whole", 2, tolerance=0.0)
    assert found.equal, str(found)

    stopped = copied(folder / "whole", folder / "stopped", step=1)
    assert_same_policy(run(stopped, changes), params)
    assert rows_of(stopped) == rows
    assert_same_checkpoint(stopped, folder / "whole")

    monkeypatch.undo()
    if (problem := misfit(folder, changes | division)) is not None:
        print(problem)
        return None
    if changes.get("model.dtype") == "bfloat16":  # its rounding depends on the mesh
        run(folder / "divided", changes | division)
        return None
    try:
        assert_trains_alike(folder / "divided", changes | division, params, rows)
    except AssertionError as difference:
        use_one_device(monkeypatch)
        if not rounding_decides(lambda near: assert_trains_alike(near, changes, params, rows), folder, monkeypatch):
            raise
        monkeypatch.undo()
        return difference
    return None


def assert_trains_alike(folder: Path, changes: dict[str, Any], params: Any, rows: list[dict[str, float]]) -> None:
    """A run has these parameters and rows, up to rounding."""
    assert_same_policy(run(folder, changes), params, tolerance=2e-4)
    assert_alike(rows_of(folder), rows, apart_from=[*OF_LAYOUT, *(GIVEN_UP if streams(changes) else ())])


def drawn(dice: random.Random, places: dict[str, str]) -> dict[str, Any]:
    """Three to eight options, with those that make a run read them; what is still not read is left out."""
    changes: dict[str, Any] = {}
    sections = sorted({key.rpartition(".")[0] for key in VALUES})
    for section in dice.choices(sections, k=dice.randint(3, 8)):  # large ones would be in nearly all combinations
        key = dice.choice(sorted(key for key in VALUES if key.rpartition(".")[0] == section))
        value = dice.choice(VALUES[key])
        changes = with_needs(key, value) | changes | {key: value}
    if "environment.path" in changes:  # which gives the rewards
        changes.pop("reward.function", None)
    changes = RECIPE | {key: in_place(value, places) for key, value in changes.items()}
    while idle := unread(small_config("", **changes)).keys() & changes:
        changes = {key: value for key, value in changes.items() if key not in idle}
    return changes


def with_needs(key: str, value: Any) -> dict[str, Any]:
    """The options with which a run reads `key`."""
    needed = NEEDS.get(f"{key}={value}", NEEDS.get(key, {}))
    for condition in READS.get(key, ()):
        read = off_and_on(condition.setting)[1]
        needed = {name: value for one in read for name, value in NEEDS.get(one, {}).items()} | read | needed
    return {name: one for name, one in needed.items() if DEFAULTS[name] != one}


def in_place(value: Any, places: dict[str, str]) -> Any:
    """A value of the table with its places, and a tuple for a list."""
    if isinstance(value, list):
        return tuple(in_place(part, places) for part in value)
    if isinstance(value, str):
        for name, place in places.items():
            value = value.replace(name, place)
    return value


def rows_of(folder: Path) -> list[dict[str, float]]:
    """Metrics, without those of the clock and of what a judge was asked, which depends on what it was asked before."""
    rows = rows_without_clock(folder)
    return [{name: value for name, value in row.items() if not name.startswith("reward/judge/")} for row in rows]


def run(folder: Path, changes: dict[str, Any]) -> Models:
    return train(small_config(folder, **changes))


def divisions(dice: random.Random, changes: dict[str, Any]) -> dict[str, Any]:
    """Another mesh, size of passes, number of rows at once, and of processes that play episodes."""
    passes = {} if "actor.ppo_max_token_len_per_device" in changes else {"actor.ppo_micro_batch_size_per_device": 1}
    workers = {"environment.num_workers": 3} if "environment.path" in changes else {}
    experts = any(family in str(changes.get("model.path")) for family in ("families/gpt_oss", "_moe"))
    layouts = [*LAYOUTS, OF_EXPERTS] if experts else LAYOUTS
    return {**dice.choice(layouts), **passes, **workers, "rollout.max_num_seqs": 24}


def streams(changes: dict[str, Any]) -> bool:
    return changes.get("algorithm.filter_groups.backfill") == "stream"


def use_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh of one device, for which programs compile faster."""

    def one(*shape: Any, **keywords: Any) -> Any:
        devices = shape[3] if len(shape) > 3 and shape[3] is not None else jax.devices()
        return make_mesh(1, 1, 1, devices[:1], **keywords)

    monkeypatch.setattr(meshes, "make_mesh", one)


def assert_alike(found: list[dict[str, float]], expected: list[dict[str, float]], *, apart_from: Sequence[str]) -> None:
    """Metrics that are equal up to rounding, apart from those of these patterns."""
    differing = [
        (row["step"], name, row.get(name), other.get(name))
        for row, other in zip(found, expected, strict=True)
        for name in row | other
        if not any(fnmatch.fnmatch(name, pattern) for pattern in apart_from)
        and not np.isclose(row.get(name, np.nan), other.get(name, np.nan), rtol=2e-3, atol=2e-4)
    ]
    assert not differing, "step, metric, found, expected:\n" + "\n".join(map(str, differing))


def misfit(folder: Path, changes: dict[str, Any]) -> InputError | None:
    """Why the devices cannot be divided so: with few rows, and passes of as many, some have none."""
    config = small_config(folder, **changes)
    try:
        meshes.make_meshes(config, read_architecture_of(config.model))
    except InputError as problem:
        return problem
    return None


def is_refused(folder: Path, changes: dict[str, Any]) -> bool:
    try:
        validate(small_config(folder, **changes))
    except InputError:
        return True
    return False


def again(number: int) -> str:
    """What draws and tries the combination again, of the same commit."""
    test = f"{Path(__file__).name}::{test_options_that_are_accepted_together_train_alike_cut_and_divided.__name__}"
    return f"OPTION_COMBINATIONS={number + 1}:{SEED} python -m pytest 'tests/{test}[{SEED}-{number}]'"


def command(changes: dict[str, Any]) -> str:
    """What runs the combination on one device."""
    options = [shlex.quote(f"--config.{key}={value}") for key, value in (SMALL | changes).items()]
    return " ".join(["JAX_NUM_CPU_DEVICES=1 python -m dapo_jax.train --config tests/small_recipe.py", *options])


TIES = """
import jax.numpy as jnp

def loss(logprobs, old_logprobs, advantages, mask):
    ratio = jnp.exp(logprobs - old_logprobs)  # 1, up to rounding, before the first update
    return -advantages * jnp.where(ratio > 1, 2.0, 1.0) * ratio, {}
"""
MESH = {"mesh.fsdp": 2, "mesh.tensor": 2, "rollout.max_num_seqs": 24}


@pytest.mark.slow
@pytest.mark.long("lost")
@pytest.mark.parametrize("name", ["ties", "lost"])
def test_runs_in_which_rounding_decides_are_told_from_meshes_that_lose_a_part(name, tmp_path, monkeypatch):
    changes: dict[str, Any] = {**RECIPE, "actor.old_logprob": "rollout"}
    if name == "ties":
        (tmp_path / "ties.py").write_text(TIES)
        changes["actor.policy_loss.loss_mode"] = f"{tmp_path}/ties.py:loss"
        assert "Mismatched elements" in str(check(changes, MESH, tmp_path, monkeypatch))
        return
    whole = update._loss_weights

    def lost(batch: Any, network: Any, mesh: Any) -> np.ndarray:
        rows = np.arange(len(batch.mask))[:, None]
        return np.where((rows % 4 == 0) & (mesh.devices.size > 1), 0.0, whole(batch, network, mesh))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "_loss_weights", lost)
        patch.setattr(small_run, "NOISES", 4)  # of 16, to save time: each run with other weights trains alike
        with pytest.raises(AssertionError, match="Mismatched elements"):
            check(changes, MESH, tmp_path, monkeypatch)


def test_each_option_is_combined_with_others_or_left_out_for_a_reason():
    patterns = [pattern for names in TABLE["left_out"].values() for pattern in names]
    left_out = {key for key in DEFAULTS if any(fnmatch.fnmatch(key, pattern) for pattern in patterns)}
    assert left_out.isdisjoint(VALUES) and left_out | set(VALUES) == set(DEFAULTS)
