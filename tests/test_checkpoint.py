"""Which checkpoints are kept, which are restored, and what is said of the others."""

import asyncio
import dataclasses
import json
import shutil
import threading
from types import SimpleNamespace

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.config.sections import OptimConfig, TrainerConfig
from dapo_jax.learner.optimizer import Models, init_state
from dapo_jax.run import checkpoint
from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.run.progress import Progress

NEWEST = {"max_ckpt_to_keep": 1, "keep_best_ckpt": 0}
SETTINGS = OptimConfig(betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)


def models(value: float) -> Models:
    return Models(actor=init_state({"w": jnp.full((3, 2), value)}, SETTINGS), critic=None)


SHAPE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), models(0.0))


def save(checkpoints, step, metric=None):
    checkpoints.save(models(step), Progress(step=step), {"next_prompt": np.array(step)}, metric=metric)


def write(directory, values, **options):
    """A checkpoint of each step; values: step -> metric."""
    checkpoints = Checkpoints(str(directory), TrainerConfig(**{**NEWEST, **options}))
    for step, metric in values.items():
        save(checkpoints, step, metric)
    checkpoints.close()


@pytest.fixture
def held(tmp_path):
    """A directory with a checkpoint of step 1."""
    write(tmp_path, {1: None})
    return tmp_path


def steps(directory):
    return sorted(int(path.name) for path in directory.iterdir())


LENGTH = {"best_metric": "eval/sums/response_length/mean", "best_metric_mode": "min"}


@pytest.mark.parametrize(
    ("starts", "kept"),
    [
        ([({}, {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.4, 5: None, 6: float("nan")})], [2, 6]),
        ([({}, {1: 0.5, 2: 0.9, 3: 0.4}), ({}, {4: 0.45})], [2, 4]),  # after a restart
        ([({"best_metric_mode": "min"}, {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.4})], [3, 4]),
        ([({"max_ckpt_to_keep": 2}, {1: 0.5, 2: 0.9, 3: 0.1, 4: None, 5: 0.4})], [2, 4, 5]),
        ([({}, {1: 0.5, 2: 0.5, 3: None, 4: 0.5, 5: None})], [1, 5]),  # of equally good ones the first
        ([({"best_metric_mode": "min"}, {1: 0.5, 2: 0.5, 3: None, 4: 0.5, 5: None})], [1, 5]),
        ([({"keep_best_ckpt": 3}, {1: None, 2: 0.5, 3: None, 4: None})], [2, 4]),  # the others are not measured
        ([({}, {1: 0.9, 2: 0.1}), (LENGTH, {3: 6.0, 4: 7.0, 5: 8.0})], [3, 5]),  # the best by another metric is not
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, starts, kept):
    for options, values in starts:
        write(tmp_path, values, **{"keep_best_ckpt": 1, **options})
    assert steps(tmp_path) == kept


def test_a_lone_checkpoint_gets_its_metric_when_its_step_has_been_evaluated(tmp_path):
    """It was saved before, and cannot be replaced: the best was forgotten."""
    write(tmp_path, {1: None})
    checkpoints = Checkpoints(str(tmp_path), TrainerConfig(max_ckpt_to_keep=1))
    checkpoints.save(models(1), Progress(step=1), {"next_prompt": np.array(1)}, metric=0.9, replace=True)
    for step, metric in ((2, 0.1), (3, 0.2)):
        save(checkpoints, step, metric)
    assert checkpoints.steps() == [1, 3]
    checkpoints.close()
    write(tmp_path, {4: 0.3}, max_ckpt_to_keep=1, keep_best_ckpt=1)
    assert steps(tmp_path) == [1, 4]


@pytest.mark.parametrize(("metric", "kept"), [("", [2, 3]), ("critic/rewards/mean", [1, 3])])
def test_the_best_on_other_held_out_problems_is_not_the_best(tmp_path, metric, kept):
    checkpoints = Checkpoints(str(tmp_path), TrainerConfig(max_ckpt_to_keep=1, best_metric=metric))
    for step, quality, held_out in ((1, 0.9, "a"), (2, 0.5, "b"), (3, 0.1, "b")):
        progress = Progress(step=step, held_out=held_out)
        checkpoints.save(models(step), progress, {"next_prompt": np.array(step)}, metric=quality)
    checkpoints.close()
    assert steps(tmp_path) == kept


def test_what_is_saved_comes_back_without_a_warning(tmp_path, caplog):
    write(tmp_path, {3: None})
    log = absl.logging.get_absl_logger()
    log.addHandler(caplog.handler)
    try:
        checkpoints = Checkpoints(str(tmp_path), TrainerConfig(), read_only=True)
        restored, progress, stream = checkpoints.restore(3, SHAPE)
        checkpoints.close()
    finally:
        log.removeHandler(caplog.handler)
    assert progress == Progress(step=3) and stream["next_prompt"] == 3
    np.testing.assert_array_equal(restored.actor.params["w"], 3.0)
    assert caplog.messages == []


def test_only_whole_checkpoints_count_as_steps_and_others_are_no_obstacle(held):
    for name in ("2.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp-17"):
        shutil.copytree(held / "1", held / name)
        shutil.rmtree(held / name / "progress")
    checkpoints = Checkpoints(str(held), TrainerConfig())
    assert checkpoints.latest_step() == 1
    assert sorted(path.name for path in held.iterdir()) == ["1"]  # at once: no thread is left to end in a traceback
    save(checkpoints, 2)
    checkpoints.close()
    assert steps(held) == [1, 2]
    for name in ("10", "run_5", "7.orbax-checkpoint-tmp"):  # workdirs beside it, and one that is being written
        (held / name).mkdir()
    assert checkpoint.saved_steps(held) == [1, 2] and checkpoint.saved_steps(held / "none") == []


def test_a_damaged_checkpoint_is_named_and_never_skipped(tmp_path):
    write(tmp_path, {1: None, 2: None}, max_ckpt_to_keep=2)
    for path in (tmp_path / "2").rglob("*"):
        if path.is_file() and path.stat().st_size > 100:
            path.write_bytes(path.read_bytes()[:50])
    checkpoints = Checkpoints(str(tmp_path), TrainerConfig(), read_only=True)
    assert checkpoints.latest_step() == 2
    with pytest.raises(ValueError, match=r"step 2 in .* is damaged .* move it away to resume from step 1"):
        checkpoints.restore(2, SHAPE)
    assert checkpoints.restore(1, SHAPE)[1] == Progress(step=1)
    checkpoints.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A directory with a checkpoint of step 4 whose arrays fill a file, the models, and their shapes."""
    directory = tmp_path_factory.mktemp("large")
    params = {"w": jax.random.normal(jax.random.key(0), (64, 96)), "b": jnp.ones(3, jnp.bfloat16)}
    models = Models(actor=init_state(params, SETTINGS), critic=None)
    checkpoints = Checkpoints(str(directory), TrainerConfig())
    checkpoints.save(models, Progress(step=4, groups_kept=7), {"next_prompt": np.array(4)})
    checkpoints.close()
    shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), models)
    return directory, models, shape


def restored(directory, shape, part="all"):
    checkpoints = Checkpoints(str(directory), TrainerConfig(), read_only=True)
    try:
        if part == "all":
            return checkpoints.restore(4, shape)
        return checkpoints.restore_policy(4, shape.actor.params)
    finally:
        checkpoints.close()


@pytest.mark.parametrize("part", ["all", "policy"])
@pytest.mark.parametrize("place", [0.2, 0.5, 0.9])
def test_a_flipped_bit_or_a_zeroed_page_is_never_restored_as_other_weights(large, tmp_path, place, part):
    directory, _, shape = large
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    file = max((path for path in (tmp_path / "4" / "models").rglob("d/*")), key=lambda path: path.stat().st_size)
    found = bytearray(file.read_bytes())
    start = int(place * len(found))
    found[start] ^= 8
    if place == 0.5:
        found[start : start + 512] = bytes(512)
    file.write_bytes(found)
    with pytest.raises(ValueError, match="step 4 in .* is damaged"):
        restored(tmp_path, shape, part)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: {}, "its progress is that of step None"),
        (lambda record: {**record, "step": 400}, "not the bits that were saved: its progress"),
        (lambda record: {**record, "groups_kept": 8}, "not the bits that were saved: its progress"),
        (lambda record: {"step": 400}, "its progress is that of step 400"),
        (lambda record: {"step": 4, "shoe_size": 1}, "shoe_size, which only a newer dapo_jax knows"),
    ],
)
def test_another_record_of_progress_is_refused(large, tmp_path, change, message):
    shutil.copytree(large[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "4" / "progress" / "metadata"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=message):
        restored(tmp_path, large[2])


def test_a_checkpoint_of_an_earlier_version_without_checksums_is_restored(large, tmp_path):
    shutil.copytree(large[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "4" / "progress" / "metadata").write_text(json.dumps({"step": 4, "groups_kept": 7}))
    assert restored(tmp_path, large[2])[1] == restored(large[0], large[2])[1] == Progress(step=4, groups_kept=7)


def test_moments_of_another_dtype_are_restored(large):
    directory, models, shape = large
    changed = {"moments": jax.tree.map(lambda leaf: leaf.update(dtype=jnp.bfloat16), shape.actor.moments)}
    found, *_ = restored(directory, dataclasses.replace(shape, actor=dataclasses.replace(shape.actor, **changed)))
    assert {leaf.dtype for leaf in jax.tree.leaves(found.actor.moments)} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(found.actor.params["w"], models.actor.params["w"])


def test_without_room_nothing_is_written_and_the_last_one_stays(held, monkeypatch):
    checkpoints = Checkpoints(str(held), TrainerConfig())
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    message = "it needs 0.02 GB, but only 0.00 GB are free. The one of step 1 is complete"
    with pytest.raises(RuntimeError, match=message):
        save(checkpoints, 2)
    checkpoints.close()
    assert steps(held) == [1]


def test_an_error_in_the_background_is_told(held, monkeypatch):
    from orbax.checkpoint import PyTreeCheckpointHandler

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(str(held), TrainerConfig())
    monkeypatch.setattr(PyTreeCheckpointHandler, "finalize", full)
    with pytest.raises(RuntimeError, match="No space left on device. The one of step 1 is complete: make room"):
        save(checkpoints, 2)
        checkpoints.close()
    assert 1 in {int(path.name) for path in held.iterdir() if path.name.isdigit()}


def test_a_checkpoint_that_takes_too_long_names_the_option(held, monkeypatch):
    from orbax.checkpoint import JsonCheckpointHandler

    end = threading.Event()
    checkpoints = Checkpoints(str(held), TrainerConfig(checkpoint_timeout_s=1))

    async def write_slowly(*_):
        while not end.is_set():
            await asyncio.sleep(0.01)

    monkeypatch.setattr(JsonCheckpointHandler, "_save_fn", write_slowly)
    with pytest.raises(RuntimeError, match="step 1 is complete: raise trainer.checkpoint_timeout_s, or write less"):
        try:
            save(checkpoints, 2)
            checkpoints.close()
        finally:
            end.set()


def test_an_array_that_cannot_be_read_leaves_no_read_under_way(held, monkeypatch):
    """Those that Orbax leaves print tracebacks, some when Python ends."""
    checkpoints, ended, begun = Checkpoints(str(held), TrainerConfig(), read_only=True), [], asyncio.new_event_loop

    async def fail():
        raise OSError("cut off. See full TensorStore details: a page")

    async def read():
        for _ in range(100):
            await asyncio.sleep(0)
        ended.append("read")

    async def read_all():
        await asyncio.gather(fail(), read(), read())

    def restore(*_, **__):  # as Orbax does
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(read_all())
        finally:
            loop.close()

    monkeypatch.setattr(checkpoints._manager, "restore", restore)
    with pytest.raises(ValueError, match=r"is damaged \(cut off\): restore .* from a copy"):
        checkpoints.restore(1, SHAPE)
    assert ended == ["read", "read"] and asyncio.new_event_loop is begun
    checkpoints.close()


def test_an_interrupt_leaves_the_loop_open_to_the_reads_under_way(held, monkeypatch):
    checkpoints, loops = Checkpoints(str(held), TrainerConfig(), read_only=True), []

    def restore(*_, **__):
        loops.append(asyncio.new_event_loop())
        try:
            raise KeyboardInterrupt
        finally:
            loops[0].close()

    monkeypatch.setattr(checkpoints._manager, "restore", restore)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.restore(1, SHAPE)
    loops[0].call_soon_threadsafe(list)  # as a read does at its end; RuntimeError if the loop is closed
    loops[0].close()
    assert loops[0].is_closed()
    checkpoints.close()
