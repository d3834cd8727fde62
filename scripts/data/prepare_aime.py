"""Host: problems of AIME and AMC as a prompt file for evaluation.

    python scripts/data/prepare_aime.py aime-2024.parquet --output data/aime-2024.parquet
    python scripts/data/prepare_aime.py aime25.jsonl --data-source aime2025 --output data/aime-2025.parquet
    python scripts/data/prepare_aime.py amc23.jsonl --data-source amc23 --output data/amc23.parquet
    python scripts/data/prepare_aime.py --download

Reads BytedTsinghua-SIA/AIME-2024 as published (960 rows, each problem 32 times), or files with a problem (`problem`,
`Problem` or `question`) and an `answer` or `Answer`, the form of most publishers. Each problem is written once;
evaluate.n draws the samples. The prompt is DAPO's. Leading zeros (073 becomes 73) and zero decimals are removed from
the answer, because `math_dapo` compares text.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("prepare_aime")

from collections.abc import Sequence
from typing import Any

from data_preparation import (
    Row,
    add_output_file,
    command,
    dapo_prompt,
    make_row,
    number_field,
    parser_of_files,
    write_one_file,
)

from dapo_jax.rewards.verifiers import verifier_for

REPOSITORY, PATTERN = "BytedTsinghua-SIA/AIME-2024", "data/*.parquet"


def competition_row(record: dict[str, Any], data_source: str) -> Row:
    """A row of verl's schema. ValueError if the problem is missing or its answer is no number."""
    reward_model = record.get("reward_model")
    if isinstance(reward_model, dict):
        answer = number_field(reward_model, "ground_truth")
    else:
        answer = number_field(record, "answer", "Answer")
    name = next((str(record[key]) for key in ("id", "ID") if record.get(key) is not None), None)
    return make_row(dapo_prompt(record), data_source=data_source, ground_truth=answer, extra_info={"id": name})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of_files(__doc__, REPOSITORY)
    parser.add_argument(
        "--data-source",
        default="aime2024",
        help="name to report accuracy under; aime..., amc23 or another that has a verifier (default: %(default)s)",
    )
    add_output_file(parser, "data/aime-2024.parquet")
    given = parser.parse_args(arguments)
    verifier_for(given.data_source)
    write_one_file(parser, given, REPOSITORY, PATTERN, lambda record: competition_row(record, given.data_source))


if __name__ == "__main__":
    command(main)
