"""Host: a generated arithmetic task whose held-out problems never occur in training."""

import math
import operator as python_operators
import string

import numpy as np

from dapo_jax.config.sections import ArithmeticConfig
from dapo_jax.data.rows import PromptRow
from dapo_jax.errors import InputError

OPERATORS = {"+": python_operators.add, "-": python_operators.sub, "*": python_operators.mul, ">": max}
COMMUTATIVE = "+*>"

Problem = tuple[int, str, int]  # a, operator, b


def arithmetic_rows(task: ArithmeticConfig, seed: int) -> tuple[list[PromptRow], list[PromptRow]]:
    """Training and held-out rows: distinct problems with both operands in [task.low, task.high].

    A family is never split between training and held-out rows: a + b together with b + a, or a problem without a
    second order. The held-out rows do not depend on task.num_train, of which 0 is all that are not held out.

    Raises:
        InputError: options that do not fit each other, or too few problems exist.
    """
    _check_options(task)
    operators, low, high, template = task.operators, task.low, task.high, task.template
    num_train, num_heldout = task.num_train, task.num_heldout
    span = high - low + 1
    num_families = sum(_num_families(operator, span) for operator in operators)

    def draw(stream: int, size: int) -> list[int]:
        rng = np.random.default_rng([seed, stream])
        return rng.choice(num_families, min(size, num_families), replace=False).tolist()

    heldout: list[Problem] = []
    heldout_families = set()
    for index in draw(0, num_heldout):
        if len(heldout) < num_heldout:
            heldout += _family(index, operators, low, span)
            heldout_families.add(index)
    train_size = num_train + len(heldout_families) if num_train else num_families
    train_families = [index for index in draw(1, train_size) if index not in heldout_families]
    train = [problem for index in train_families for problem in _family(index, operators, low, span)]

    if len(heldout) < num_heldout or len(train) < max(num_train, 1):
        raise InputError(
            f"data.arithmetic.operators={operators!r} with operands from {low} to {high} make "
            f"{len(operators) * span**2} problems, too few for num_train={num_train} and num_heldout={num_heldout}: "
            "lower these or widen low..high"
        )
    return (
        _rows(train[: num_train or None], "train", template),
        _rows(heldout[:num_heldout], "heldout", template),
    )


def _check_options(task: ArithmeticConfig) -> None:
    operators, low, high, template = task.operators, task.low, task.high, task.template
    if not operators or len(set(operators)) < len(operators) or not set(operators) <= set(OPERATORS):
        raise InputError(
            f"data.arithmetic.operators={operators!r} must be some of {''.join(OPERATORS)}, each once: correct it"
        )
    if low > high:
        raise InputError(f"data.arithmetic.low={low} must not exceed high={high}: swap them")
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    except ValueError:  # a brace that is not closed
        fields = set()
    if fields - {"operator"} != {"a", "b"} or (len(operators) > 1 and "operator" not in fields):
        raise InputError(
            f"data.arithmetic.template={template!r} must have the fields {{a}}, {{b}} and {{operator}} and no others "
            "(a single operator may be left out): correct it"
        )


def _num_families(operator: str, span: int) -> int:
    return span * (span + 1) // 2 if operator in COMMUTATIVE else span**2


def _family(index: int, operators: str, low: int, span: int) -> list[Problem]:
    """The problems of family number `index`, counted operator by operator."""
    for operator in operators:
        if index < _num_families(operator, span):
            break
        index -= _num_families(operator, span)
    if operator not in COMMUTATIVE:
        a, b = divmod(index, span)
        return [(low + a, operator, low + b)]
    b = (math.isqrt(8 * index + 1) - 1) // 2  # pairs a <= b in the order (0, 0), (0, 1), (1, 1), (0, 2), ...
    a = index - b * (b + 1) // 2
    both_orders = [(low + a, operator, low + b), (low + b, operator, low + a)]
    return both_orders if a != b else both_orders[:1]


def _rows(problems: list[Problem], split: str, template: str) -> list[PromptRow]:
    rows = []
    for index, (a, operator, b) in enumerate(problems):
        text = template.format(a=a, operator=operator, b=b)
        extra_info = {"split": split, "index": index, "a": a, "b": b, "operator": operator}
        answer = str(OPERATORS[operator](a, b))
        rows.append(PromptRow(({"role": "user", "content": text},), "arithmetic", answer, extra_info))
    return rows
