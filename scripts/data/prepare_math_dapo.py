"""Host: DAPO-Math-17k (arXiv:2503.14476) as a prompt file without repetitions.

    python scripts/data/prepare_math_dapo.py dapo-math-17k.parquet --output data/dapo-math-17k.parquet
    python scripts/data/prepare_math_dapo.py --download

Reads BytedTsinghua-SIA/DAPO-Math-17k as published: 1.79 million rows in verl's schema, which hold about 17 thousand
prompts, each about a hundred times, by accident. Only one copy of each is written, because training repeats the prompts
for any number of epochs. A prompt that is plain text is wrapped in DAPO's prompt. Prompts with several answers are left
out. The verifier is `math_dapo`.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("prepare_math_dapo")

from collections.abc import Sequence
from typing import Any

from data_preparation import (
    Row,
    add_output_file,
    command,
    dapo_prompt,
    make_row,
    parser_of_files,
    text_field,
    write_one_file,
)

REPOSITORY, PATTERN = "BytedTsinghua-SIA/DAPO-Math-17k", "data/*.parquet"


def math_dapo_row(record: dict[str, Any]) -> Row:
    """A row of verl's schema, without what the verifier does not need. ValueError if a field is missing."""
    reward_model, extra_info = record.get("reward_model"), record.get("extra_info")
    answer = text_field(reward_model if isinstance(reward_model, dict) else record, "ground_truth")
    index = extra_info.get("index") if isinstance(extra_info, dict) else None
    index = None if index is None else str(index)
    return make_row(dapo_prompt(record), data_source="math_dapo", ground_truth=answer, extra_info={"index": index})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of_files(__doc__, REPOSITORY)
    add_output_file(parser, "data/dapo-math-17k.parquet")
    given = parser.parse_args(arguments)
    write_one_file(parser, given, REPOSITORY, PATTERN, math_dapo_row)


if __name__ == "__main__":
    command(main)
