"""Host: problems that the library reasoning-gym generates (Stojanovski et al., arXiv:2505.24760), and their verifier.

A problem is a function of (data set, seed, index) alone. A row carries these three, and the verifier generates the
problem from them again: what the library needs to score an answer often cannot be written as JSON.
"""

import copy
import difflib
import functools
import hashlib
import re
import string
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from dapo_jax.config.sections import ReasoningGymConfig
from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError

SOURCE_PREFIX = "reasoning_gym/"  # of data_source, before the name of the data set
# Their problems depend on Python's hash seed (reasoning-gym 0.1.25), so they differ from process to process.
UNREPEATABLE = frozenset("isomorphic_strings knight_swap polynomial_multiplication ransom_note word_ladder".split())
SIZE = 10_000  # of a data set; the few that generate all of their problems at once have no more
MAX_DRAWS = 20  # per problem, before a data set counts as too small
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_gym_rows(task: ReasoningGymConfig, seed: int) -> tuple[list[PromptRow], list[PromptRow]]:
    """Training and held-out rows of each data set, without repeated questions.

    The held-out rows do not depend on task.num_train.

    Raises:
        InputError: the library is not installed, a name is unknown or unrepeatable, or a data set has too few problems.
    """
    template, num_heldout = task.template, task.num_heldout
    fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    if fields != {"question"}:
        raise InputError(f"template={template!r} must have the field {{question}} and no others: correct it")
    check_names(task.datasets)
    library_seed = int(np.random.SeedSequence(seed).generate_state(1)[0]) // 2  # the library adds the index to it
    train, heldout = [], []
    for name in task.datasets:
        rows = _distinct_rows(name, library_seed, num_heldout + task.num_train, template)
        heldout += [next(rows) for _ in range(num_heldout)]
        train += rows
    return _with_split(train, "train"), _with_split(heldout, "heldout")


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """The library's score, 0 to 1, of the last `<answer>...</answer>`, or of the whole solution without one.

    acc is 1 only for a full score. Many answers may be right, so the ground truth is not read: the problem is
    generated again from extra_info.

    Raises:
        ValueError: extra_info does not name a problem, or this process generates a different one from it.
    """
    name = data_source.removeprefix(SOURCE_PREFIX)
    try:
        seed, index, expected = (extra_info[key] for key in ("seed", "index", "digest"))
    except KeyError as error:
        raise ValueError(f"extra_info lacks {error}: take rows of data.task=reasoning_gym") from error
    dataset, entry = problem(name, seed, index)
    if digest(entry["question"]) != expected:
        raise ValueError(
            f"{name} generates different problems in each process: remove it from data.reasoning_gym.datasets"
        )
    answers = _ANSWER.findall(solution)
    pred = (answers[-1] if answers else solution).strip()
    value = float(dataset.score_answer(pred, entry))
    return {"score": value, "acc": value >= 1, "pred": pred}


def problem(name: str, seed: int, index: int) -> tuple[Any, dict[str, Any]]:
    """The library's data set and its entry: `question`, `answer` and what scoring needs. IndexError past its end."""
    return _dataset(name, seed), copy.deepcopy(_entry(name, seed, index))


def digest(question: str) -> str:
    """A hash by which the verifier checks that it has generated the same problem."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]


def load_library() -> Any:
    """The module reasoning_gym. ValueError, with the fix, if it is not installed."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise InputError(
            f"data.task=reasoning_gym needs the library reasoning-gym ({error}): pip install 'dapo_jax[reasoning-gym]'"
        ) from error
    return reasoning_gym


def check_names(datasets: Sequence[str]) -> None:
    """Raises ValueError if a name is unknown to the library, or its problems cannot be generated again."""
    known = load_library().factory.DATASETS
    for name in datasets:
        if name not in known or name == "composite":
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "its documentation lists them"
            raise InputError(f"data.reasoning_gym.datasets: the library has no data set {name!r}: {hint}")
        if name in UNREPEATABLE:
            raise InputError(
                f"data.reasoning_gym.datasets: the problems of {name!r} differ from process to process, so that "
                "verifiers cannot know them: leave it out"
            )


@functools.lru_cache(maxsize=256)
def _dataset(name: str, seed: int) -> Any:
    return load_library().create_dataset(name, seed=seed, size=SIZE)


@functools.lru_cache(maxsize=256)
def _entry(name: str, seed: int, index: int) -> dict[str, Any]:
    return _dataset(name, seed)[index]


def _distinct_rows(name: str, seed: int, count: int, template: str) -> Iterator[PromptRow]:
    """The first `count` problems with different questions."""
    seen: set[str] = set()
    with suppress(IndexError):
        for index in range(MAX_DRAWS * count):
            if len(seen) == count:
                return
            _, entry = problem(name, seed, index)
            if entry["question"] not in seen:
                seen.add(entry["question"])
                message = {"role": "user", "content": template.format(question=entry["question"])}
                extra_info = {"seed": seed, "index": index, "digest": digest(entry["question"])}
                yield PromptRow((message,), SOURCE_PREFIX + name, str(entry["answer"]), extra_info)
    if len(seen) < count:
        raise InputError(
            f"data.reasoning_gym.datasets: {name} has {len(seen)} different problems, fewer than num_train + "
            f"num_heldout = {count}: lower these"
        )


def _with_split(rows: list[PromptRow], split: str) -> list[PromptRow]:
    return [PromptRow(row.prompt, row.data_source, row.ground_truth, row.extra_info | {"split": split}) for row in rows]
