"""Which checkpoints are kept, which are restored, and what is said of the others."""

import asyncio
import shutil
import threading
from types import SimpleNamespace

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax import checkpoint
from dapo_jax.checkpoint import Checkpoints
from dapo_jax.learner.optimizer import Models, OptimizerSettings, init_state
from dapo_jax.progress import Progress

SETTINGS = OptimizerSettings(betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, grad_clip=1.0)


def models(value: float) -> Models:
    return Models(actor=init_state({"w": jnp.full((3, 2), value)}, SETTINGS), critic=None)


SHAPE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), models(0.0))


def save(checkpoints, step, metric=None):
    checkpoints.save(models(step), Progress(step=step), {"next_prompt": np.array(step)}, metric=metric)


def write(directory, values, **options):
    """A checkpoint of each step; values: step -> metric."""
    checkpoints = Checkpoints(str(directory), **options)
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


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 3)])
def test_the_newest_and_the_best_are_kept(tmp_path, mode, best):
    values = {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.4, 5: None, 6: float("nan"), 7: 0.4}
    write(tmp_path / mode, values, max_to_keep=2, keep_best=1, mode=mode)
    assert steps(tmp_path / mode) == [best, 6, 7]
    write(tmp_path / mode, {8: 0.45}, max_to_keep=2, keep_best=1, mode=mode)  # after a restart
    assert steps(tmp_path / mode) == [best, 7, 8]


def test_of_equally_good_ones_the_first_is_kept(tmp_path):
    for mode in ("max", "min"):
        write(tmp_path / mode, {1: 0.5, 2: 0.5, 3: None, 4: 0.5, 5: None}, max_to_keep=1, keep_best=1, mode=mode)
        assert steps(tmp_path / mode) == [1, 5]


def test_a_lone_checkpoint_gets_its_metric_when_its_step_has_been_evaluated(tmp_path):
    """It was saved before, and cannot be replaced: the best was forgotten."""
    write(tmp_path, {1: None})
    checkpoints = Checkpoints(str(tmp_path), max_to_keep=1, keep_best=1)
    checkpoints.save(models(1), Progress(step=1), {"next_prompt": np.array(1)}, metric=0.9, replace=True)
    for step, metric in ((2, 0.1), (3, 0.2)):
        save(checkpoints, step, metric)
    assert checkpoints.steps() == [1, 3]
    checkpoints.close()
    write(tmp_path, {4: 0.3}, max_to_keep=1, keep_best=1)
    assert steps(tmp_path) == [1, 4]


def test_the_best_by_another_metric_is_not_the_best(tmp_path):
    write(tmp_path, {1: 0.9, 2: 0.1, 3: 0.2}, max_to_keep=1, keep_best=1)
    assert steps(tmp_path) == [1, 3]
    length = {"metric": "eval/sums/response_length/mean", "mode": "min"}
    write(tmp_path, {4: 6.0, 5: 7.0, 6: 8.0}, max_to_keep=1, keep_best=1, **length)
    assert steps(tmp_path) == [4, 6]


def test_what_is_saved_comes_back_without_a_warning(tmp_path, caplog):
    write(tmp_path, {3: None})
    log = absl.logging.get_absl_logger()
    log.addHandler(caplog.handler)
    try:
        checkpoints = Checkpoints(str(tmp_path), read_only=True)
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
    checkpoints = Checkpoints(str(held), max_to_keep=2)
    assert checkpoints.latest_step() == 1
    assert sorted(path.name for path in held.iterdir()) == ["1"]  # at once: no thread is left to end in a traceback
    save(checkpoints, 2)
    checkpoints.close()
    assert steps(held) == [1, 2]
    for name in ("10", "run_5", "7.orbax-checkpoint-tmp"):  # workdirs beside it, and one that is being written
        (held / name).mkdir()
    assert checkpoint.saved_steps(held) == [1, 2] and checkpoint.saved_steps(held / "none") == []


def test_a_damaged_checkpoint_is_named_and_never_skipped(tmp_path):
    write(tmp_path, {1: None, 2: None}, max_to_keep=2)
    for path in (tmp_path / "2").rglob("*"):
        if path.is_file() and path.stat().st_size > 100:
            path.write_bytes(path.read_bytes()[:50])
    checkpoints = Checkpoints(str(tmp_path), read_only=True)
    assert checkpoints.latest_step() == 2
    with pytest.raises(ValueError, match=r"step 2 in .* is damaged .* move it away to resume from step 1"):
        checkpoints.restore(2, SHAPE)
    assert checkpoints.restore(1, SHAPE)[1] == Progress(step=1)
    checkpoints.close()


def test_without_room_nothing_is_written_and_the_last_one_stays(held, monkeypatch):
    checkpoints = Checkpoints(str(held))
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

    checkpoints = Checkpoints(str(held))
    monkeypatch.setattr(PyTreeCheckpointHandler, "finalize", full)
    with pytest.raises(RuntimeError, match="No space left on device. The one of step 1 is complete: make room"):
        save(checkpoints, 2)
        checkpoints.close()
    assert 1 in {int(path.name) for path in held.iterdir() if path.name.isdigit()}


def test_a_checkpoint_that_takes_too_long_names_the_option(held, monkeypatch):
    from orbax.checkpoint import JsonCheckpointHandler

    end = threading.Event()
    checkpoints = Checkpoints(str(held), timeout_s=1)

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
    checkpoints, ended, begun = Checkpoints(str(held), read_only=True), [], asyncio.new_event_loop

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
    checkpoints, loops = Checkpoints(str(held), read_only=True), []

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
