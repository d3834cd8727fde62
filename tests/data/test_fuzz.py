"""Readers of prompt files meet any bytes: rows or a ValueError that names the file, and nothing else."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damaged_bytes import JSON, damaged, fuzz, little_memory, read_or_refused
from ends_within import ends_within
from hypothesis import given
from hypothesis import strategies as st

from dapo_jax.data.prompt_files import read_prompt_files

ROW = {
    "prompt": [{"role": "user", "content": "1 + 1 ="}],
    "data_source": "arithmetic",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 3, "split": "train"},
}


def written(rows, **options) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue().to_pybytes()


LINES = (json.dumps(ROW) + "\n" + json.dumps({**ROW, "prompt": "ü"}, ensure_ascii=False) + "\n").encode()
WHOLE = {
    "plain": written([ROW] * 3, compression="none", use_dictionary=False),
    "snappy": written([ROW] * 40, compression="snappy"),
    "zstd": written([ROW] * 40, compression="zstd"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    return (root / str(number) for number in range(10**6))


def check(path, content):
    path.write_bytes(content)
    with little_memory(), ends_within(), read_or_refused(path):
        for row in read_prompt_files([str(path)]):
            assert row.prompt and row.data_source and row.ground_truth != "" and isinstance(row.extra_info, dict)
            json.dumps([row.prompt, row.data_source, row.ground_truth], ensure_ascii=False).encode()


@fuzz(300)
@given(damaged(LINES))
def test_damaged_json_lines(places, content):
    check(next(places).with_suffix(".jsonl"), content)


@fuzz(300)
@given(st.lists(JSON | st.dictionaries(st.sampled_from([*ROW]), JSON).map(lambda new: {**ROW, **new}), max_size=3))
def test_rows_with_other_values(places, rows):
    check(next(places).with_suffix(".jsonl"), "".join(json.dumps(row) + "\n" for row in rows).encode())


@pytest.mark.parametrize("name", WHOLE)
def test_parquet(places, name):
    @fuzz(300)
    @given(damaged(WHOLE[name]))
    def read(content):
        check(next(places).with_suffix(".parquet"), content)

    read()
