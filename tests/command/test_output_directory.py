import pytest

from dapo_jax.command import output_directory
from dapo_jax.command.output_directory import new_output
from dapo_jax.evaluate import evaluate


def write(output, names):
    with output_directory.output_directory(output) as directory:
        for name in names:
            (directory / name).write_text(name)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_directory_that_is_there_is_whole(tmp_path):
    output = tmp_path / "deep" / "out"

    def killed():
        yield "config.json"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(output, killed())
    new_output(output)
    assert files(tmp_path) == ["deep/out.partial/config.json"]
    write(output, ["weights"])
    assert files(tmp_path) == ["deep/out/weights"] and not output.with_name("out.partial").exists()


def test_only_a_new_or_an_empty_directory_is_written(tmp_path, monkeypatch):
    write(tmp_path, ["weights"])
    assert files(tmp_path) == ["weights"]
    for taken in (tmp_path, tmp_path / "weights"):
        with pytest.raises(ValueError, match="must be a new or an empty directory"):
            new_output(taken)
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(output_directory.Path, "rmdir", lambda path: (_ for _ in ()).throw(OSError(16, "busy")))
    with pytest.raises(ValueError, match="volume cannot be replaced .*busy.*: name a new directory inside it"):
        write(tmp_path / "volume", ["weights"])


@pytest.mark.parametrize("first", [True, False])
def test_process_0_says_whether_an_output_is_there(tmp_path, monkeypatch, first):
    """It may have renamed the directory before another process looks."""
    monkeypatch.setattr(output_directory, "gather", lambda _: [first, not first])
    assert output_directory.is_written(tmp_path) == first


def test_no_evaluation_is_made_twice_if_missing(tmp_path, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(evaluate, "bench", lambda config, output, **_: made.append(output) or [])
    monkeypatch.setattr(evaluate, "table", lambda results: "")
    command = ["--config", "configs/tiny.py", "--if-missing", "--output"]
    evaluate.main([*command, str(tmp_path / "out")])
    write(tmp_path / "out", ["metrics.json"])
    evaluate.main([*command, str(tmp_path / "out")])
    assert made == [str(tmp_path / "out")]
