"""Host: the rows of a data set of the hub whose columns are not verl's: GSM8K (Cobbe et al., arXiv:2110.14168)."""

import re
from typing import Any

from dapo_jax.hub.names import data_name

GSM8K = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'  # verl's
ANSWER = re.compile(r"#### (-?[0-9.,]+)\s*$")  # at the end of a solution


def gsm8k_columns(question: str, solution: str, truth: str) -> dict[str, Any]:
    """The columns of verl's schema for a question. The ground truth is the number without thousands commas."""
    return {
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "data_source": GSM8K,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth.replace(",", "")},
        "extra_info": {"question": question, "solution": solution},
    }


def in_verl_schema(source: str, record: Any) -> Any:
    """A row of the entry `source` of data.train_files in verl's schema, if it is one of GSM8K; any other unchanged."""
    name = data_name(source)
    if name is None or name.repository != GSM8K or not isinstance(record, dict):
        return record
    question, solution = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not isinstance(solution, str) or (found := ANSWER.search(solution)) is None:
        return record
    return gsm8k_columns(question, solution, found[1])
