"""Which files of a data set hold a split: what its README declares, else the usual layouts."""

import pytest

from dapo_jax.hub.client import is_inside
from dapo_jax.hub.splits import known_splits, split_files

LAYOUTS = {
    "config folders": (
        ["main/train-00001-of-00002.parquet", "main/train-00000-of-00002.parquet", "x/train.jsonl"],
        {
            "main/train": ["main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"],
            "x/train": ["x/train.jsonl"],
            "main/tes": [],
            "main/val": [],
        },
    ),
    "data folder": (
        ["data/train-0.parquet", "data/trained.parquet", "data/test.parquet"],
        {"train": ["data/train-0.parquet"], "default/test": ["data/test.parquet"], "data/test": ["data/test.parquet"]},
    ),
    "others of its name": (
        [f"data/{name}-00000-of-00001.parquet" for name in ("test", "train", "train_gen", "train.sft", "train-a")],
        {name: [f"data/{name}-00000-of-00001.parquet"] for name in ("train", "train_gen", "train.sft")},
    ),
    "no split of that name": (["data/train_sft-00000-of-00001.parquet"], {"train": []}),
    "folders of shards": (["data/train/a-00000-of-00001.parquet"], {"train": ["data/train/a-00000-of-00001.parquet"]}),
    "root": (["train.jsonl", "test.jsonl", "notes.json"], {"train": ["train.jsonl"], "default/test": ["test.jsonl"]}),
    "the hub's copy": (
        ["default/train/0000.parquet", "default/train/0001.parquet", "other/train/0000.parquet"],
        {
            "train": ["default/train/0000.parquet", "default/train/0001.parquet"],
            "other/train": ["other/train/0000.parquet"],
        },
    ),
    "unnamed": (["data/math-17k.parquet"], {"train": ["data/math-17k.parquet"], "test": []}),
    "one split": (["test.parquet"], {"train": [], "test": ["test.parquet"]}),
    "a file": (["a/b.parquet", "a/c.csv"], {"a/b.parquet": ["a/b.parquet"], "a/c.csv": []}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_usual_layouts_are_understood(layout):
    files, expected = LAYOUTS[layout]
    for part, found in expected.items():
        assert split_files([*files, "README.md"], part, {}) == found, part


def test_the_readme_decides():
    files = ["a/x-0.parquet", "a/x-1.parquet", "b/deep/y.parquet", "c.csv", "train.parquet"]
    declared = [{"split": "train", "path": "a/x-*"}, {"split": "test", "path": ["b/**/deep/*"]}]
    configs = [
        {"config_name": "one", "data_files": declared},
        {"config_name": "two", "data_files": "a/x-0.parquet", "default": True},
        {"config_name": "three", "data_dir": "b", "data_files": {"dev": "./deep/*"}},
        {"config_name": "damaged", "data_files": 3},
        "damaged",
    ]
    readme = {"configs": configs}
    for part, found in {
        "one/train": ["a/x-0.parquet", "a/x-1.parquet"],
        "one/test": ["b/deep/y.parquet"],
        "two/train": ["a/x-0.parquet"],
        "train": ["a/x-0.parquet"],  # of the default
        "three/dev": ["b/deep/y.parquet"],
        "four/train": [],
        "one/dev": [],
    }.items():
        assert split_files(files, part, readme) == found, part
    assert known_splits(files, readme) == ["one/train", "one/test", "two/train", "three/dev"]
    only = {"configs": configs[:1]}
    assert split_files(files, "train", only) == ["a/x-0.parquet", "a/x-1.parquet"]
    several = {"configs": [configs[0], configs[2]]}
    assert split_files(files, "train", several) == []  # none is the default


@pytest.mark.parametrize(
    ("pattern", "found"),  # the places of the files that it takes
    [
        *[("data/*", "1"), ("*.parquet", "03"), ("**/*.parquet", "0123"), ("**", "0123"), ("data/**", "12")],
        *[("data/**/*.parquet", "12"), ("[ab].parquet", "0"), ("[!a].parquet", "3"), ("?.parquet", "03"), ("a+", "")],
    ],
)
def test_a_declared_star_stays_in_its_folder(pattern, found):
    files = ["a.parquet", "data/a.parquet", "data/test/b.parquet", "e.parquet"]
    readme = {"configs": [{"data_files": [{"split": "train", "path": pattern}]}]}
    assert split_files(files, "train", readme) == [files[int(place)] for place in found]


def test_what_is_no_prompt_file_is_left_out():
    assert split_files(["train.csv", "train.txt", "train"], "train", {}) == []
    assert known_splits(["train.csv", "b.jsonl", "a.parquet"], {}) == ["a.parquet", "b.jsonl"]


def test_names_that_leave_the_folder_of_a_repository_are_left_out():
    assert all(map(is_inside, ["config.json", "data/train-0.parquet", "a..b/c.json"]))
    assert not any(map(is_inside, ["/etc/passwd", "../other/config.json", "data/../../x", ".."]))
