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


def lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


UMLAUT = (json.dumps({**ROW, "prompt": "ü"}, ensure_ascii=False) + "\n").encode()
OTHER_ROWS = st.lists(JSON | st.dictionaries(st.sampled_from([*ROW]), JSON).map(lambda new: {**ROW, **new}), max_size=3)
CONTENTS = {
    "damaged.jsonl": damaged(lines([ROW]) + UMLAUT),
    "other_values.jsonl": OTHER_ROWS.map(lines),
    "plain.parquet": damaged(written([ROW] * 3, compression="none", use_dictionary=False)),
    "snappy.parquet": damaged(written([ROW] * 40, compression="snappy")),
    "zstd.parquet": damaged(written([ROW] * 40, compression="zstd")),
}


@pytest.mark.short("50-damaged", "50-other", "50-snappy")
@pytest.mark.long("300-damaged", "300-other", "300-snappy")
@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("examples", [50, 300])
def test_any_content_is_read_or_refused(tmp_path, name, examples):
    numbers = iter(range(examples + 1))

    @fuzz(examples)
    @given(CONTENTS[name])
    def read(content):
        path = tmp_path / f"{next(numbers)}{name}"
        path.write_bytes(content)
        with little_memory(), ends_within(), read_or_refused(path):
            for row in read_prompt_files([str(path)]):
                assert row.prompt and row.data_source and row.ground_truth != "" and isinstance(row.extra_info, dict)
                json.dumps([row.prompt, row.data_source, row.ground_truth], ensure_ascii=False).encode()

    read()
