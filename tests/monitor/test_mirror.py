"""A work directory in a bucket: what the run writes here is there, and one run at a time holds it."""

import pytest
from bucket import ADDRESS, make_bucket

from dapo_jax.config import places
from dapo_jax.monitor import lock
from dapo_jax.monitor.mirror import mirrored
from dapo_jax.monitor.records import RunRecords, read_metrics
from dapo_jax.monitor.tensorboard import EVENTS
from dapo_jax.monitor.workdir import open_workdir

RUN = f"{ADDRESS}/run"


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    return make_bucket(tmp_path, monkeypatch)


def test_a_row_is_in_the_bucket_when_it_is_written(bucket):
    """A checkpoint, which comes after it, would else be of a step without a row."""
    with open_workdir(RUN, detailed=False) as workdir:
        with RunRecords(workdir.folder, resume_step=None, upload=workdir.upload) as records:
            records.write(1, {"x": 1.0})
            assert read_metrics(bucket / "run") == [{"step": 1, "x": 1.0}]
    assert (bucket / "run" / "train.log").exists() and list((bucket / "run").glob(EVENTS))


def test_the_bucket_becomes_what_the_folder_is(bucket):
    for name in ("kept", "samples/removed", "checkpoints/1/large"):
        path = bucket / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    with mirrored(RUN) as mirror:
        assert (mirror.folder / "kept").read_text() == "kept" and not (mirror.folder / "checkpoints").exists()
        (mirror.folder / "samples" / "removed").unlink()
        (mirror.folder / "samples" / "new").write_text("new")
        (mirror.folder / "kept").write_text("changed")
        (mirror.folder / "lock.1").write_text("of this machine")
        mirror.upload("kept")
        assert (bucket / "run" / "kept").read_text() == "changed" and not (bucket / "run" / "samples" / "new").exists()
    found = {str(path.relative_to(bucket / "run")) for path in bucket.rglob("*") if path.is_file()}
    assert found == {"kept", "samples/new", "checkpoints/1/large", "lock.1"}
    assert "released" in (bucket / "run" / "lock.1").read_text()


def test_an_upload_that_fails_is_tried_again(bucket, monkeypatch):
    with mirrored(RUN) as mirror:
        (mirror.folder / "a").write_text("a")
        with monkeypatch.context() as patch:
            patch.setattr("etils.epath.gpath._GPath.copy", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                mirror.upload()
    assert (bucket / "run" / "a").exists()


def test_one_run_at_a_time_holds_a_bucket(bucket, monkeypatch):
    with mirrored(RUN):
        with pytest.raises(ValueError, match=f"workdir={RUN} is locked by another run .*last heartbeat just now"):
            with mirrored(RUN):
                pass
    with mirrored(RUN):  # at once
        pass
    (bucket / "run" / "lock.9").write_text('{"process": 1, "host": "gone", "machine": "gone"}')
    monkeypatch.setattr(lock, "DEAD_AFTER_S", 0.3)
    with mirrored(RUN):
        assert (bucket / "run" / "lock.10").exists()
