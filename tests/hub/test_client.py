import pytest

from dapo_jax.hub.client import is_inside


@pytest.mark.parametrize("file", ["config.json", "data/train-0.parquet", "a..b/c.json"])
def test_files_of_a_repository_stay_in_its_folder(file):
    assert is_inside(file)


@pytest.mark.parametrize("file", ["/etc/passwd", "../other/config.json", "data/../../x", ".."])
def test_names_that_leave_the_folder_are_left_out(file):
    assert not is_inside(file)
