import pytest

from dapo_jax.data.model_files import read_object, unreadable


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    path = tmp_path / "weights"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "a Git LFS pointer, not the file itself: run 'git lfs pull'" in str(unreadable(path, KeyError()))
    path.write_bytes(b"")
    assert "is damaged or incomplete (too short)" in str(unreadable(path, ValueError("too short")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is damaged or incomplete .Expecting property name"),
        (b"", "is damaged or incomplete .Expecting value"),
        (b"[1]", "must hold a JSON object, not a list: download it again"),
        (b"null", "must hold a JSON object, not a NoneType"),
        (b"\xff\xfe", "is damaged or incomplete .'utf-8' codec"),
        (b"[" * 100_000, "is damaged or incomplete .maximum recursion"),
        (b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer"),
    ],
)
def test_a_file_without_a_json_object_is_named(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"config.json {message}"):
        read_object(tmp_path / "config.json")


def test_an_object_is_read(tmp_path):
    (tmp_path / "config.json").write_text('{"ü": [1]}', encoding="utf-8")
    assert read_object(tmp_path / "config.json") == {"ü": [1]}
