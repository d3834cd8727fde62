"""Host: public data sets as rows of verl's schema."""

import re
from typing import Any

from dapo_jax.errors import InputError
from dapo_jax.hub.names import data_name

Row = dict[str, Any]

FILES = {  # of `dapo-jax data NAME`: each file below its --output, and the split on the hub; "" = only from --input
    "gsm8k": {f"gsm8k/{split}.parquet": f"hf://openai/gsm8k/main/{split}" for split in ("train", "test")},
    "dapo-math-17k": {"dapo-math-17k.parquet": "hf://BytedTsinghua-SIA/DAPO-Math-17k/train"},
    "aime-2024": {"aime-2024.parquet": "hf://BytedTsinghua-SIA/AIME-2024/train"},
    "aime-2025": {"aime-2025.parquet": ""},
    "amc-2023": {"amc-2023.parquet": ""},
    "sums": {"sums/train.parquet": "", "sums/heldout.parquet": ""},  # generated: worked_sums.py
}
TEST_PROBLEMS = {"aime-2024.parquet": 30, "gsm8k/test.parquet": 1319, "gsm8k/main/test": 1319}  # by the end of a path
GSM8K = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'  # verl's
ANSWER = re.compile(r"#### (-?[0-9.,]+)\s*$")  # at the end of a solution


def make_row(problem: str, *, data_source: str, ground_truth: str, extra_info: dict[str, Any]) -> Row:
    """A row whose prompt is one message of the user."""
    return {
        "prompt": [{"role": "user", "content": problem}],
        "data_source": data_source,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def text_of(record: dict[str, Any], *names: str) -> str:
    """The text of the first of the fields `names` that the row has. InputError if none is non-empty text."""
    value = next((record[name] for name in names if record.get(name) is not None), None)
    if isinstance(value, str) and value.strip():
        return value
    found = f"it is {value!r:.60}" if value is not None else f"the row has {', '.join(record) or 'no fields'}"
    raise InputError(
        f"{' or '.join(names)} must be non-empty text, and {found}: give the file as its publisher ships it"
    )


def gsm8k_row(record: dict[str, Any]) -> Row:
    """A row of GSM8K (Cobbe et al., arXiv:2110.14168). The ground truth is the number without thousands commas."""
    question, solution = text_of(record, "question"), text_of(record, "answer")
    if (found := ANSWER.search(solution)) is None:
        raise InputError(f"answer must end in '#### <number>', not {solution[-60:]!r}: correct the row")
    extra_info, truth = {"question": question, "solution": solution}, found[1].replace(",", "")
    return make_row(f"{question} {INSTRUCTION}", data_source=GSM8K, ground_truth=truth, extra_info=extra_info)


def in_verl_schema(source: str, record: Any) -> Any:
    """A row of the entry `source` of data.train_files in verl's schema, if it is one of GSM8K; any other unchanged."""
    name = data_name(source)
    if name is None or name.repository != GSM8K or not isinstance(record, dict):
        return record
    try:
        return gsm8k_row(record)
    except InputError:
        return record


def num_test_problems(path: str) -> int | None:
    """The problems of a prompt file or a split, by its name alone; None if it is no public data set's."""
    return next(
        (number for name, number in TEST_PROBLEMS.items() if f"/{path.split('@')[0]}".endswith(f"/{name}")), None
    )
