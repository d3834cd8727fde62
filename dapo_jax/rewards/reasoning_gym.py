"""Host: the verifier for reasoning-gym problems: the check of the data set that generated the problem."""

import re
from typing import Any

from dapo_jax.data import reasoning_gym

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """The library's score, 0 to 1, of the last `<answer>...</answer>`, or of the whole solution without one.

    acc is 1 only for a full score. Many answers may be right, so the ground truth is not read: the problem is
    generated again from extra_info.

    Raises:
        ValueError: extra_info does not name a problem, or this process generates a different one from it.
    """
    name = data_source.removeprefix(reasoning_gym.SOURCE_PREFIX)
    try:
        seed, index, digest = (extra_info[key] for key in ("seed", "index", "digest"))
    except KeyError as error:
        raise ValueError(f"extra_info lacks {error}: take rows of data.task=reasoning_gym") from error
    dataset, entry = reasoning_gym.problem(name, seed, index)
    if reasoning_gym.digest(entry["question"]) != digest:
        raise ValueError(
            f"{name} generates different problems in each process: remove it from data.reasoning_gym.datasets"
        )
    answers = _ANSWER.findall(solution)
    pred = (answers[-1] if answers else solution).strip()
    value = float(dataset.score_answer(pred, entry))
    return {"score": value, "acc": value >= 1, "pred": pred}


def load() -> None:
    """Loads the library, so that loading does not count against the first sample's time limit."""
    reasoning_gym.load_library()
