"""Host: what a person sees of a run: a progress bar, one line a step, and a table at the end."""

import re
import sys
from collections.abc import Mapping, Sequence

from tqdm import tqdm

# label, metric, width, format
_COLUMNS = (
    ("rounds", "train/num_gen_batches", 2, ".0f"),
    ("len", "response_length/mean", 7, ".1f"),
    ("entropy", "actor/entropy", 6, ".3f"),
    ("loss", "actor/pg_loss", 8, ".4f"),
    ("grad", "actor/grad_norm", 8, ".3f"),
    ("lr", "actor/lr", 8, ".2e"),
    ("clip", "actor/pg_clipfrac", 6, ".4f"),
    ("seconds", "timing_s/step", 7, ".1f"),
)
_EVAL_METRIC = re.compile(r"eval/(.+)/acc/(mean@\d+)")


class Console:
    """Progress bar (stderr, only on a terminal) and result lines (stdout, always).

    Args:
        total_steps: training steps of the whole run.
        initial_step: steps done before this start, 0 for a new run.
        enabled: False shows nothing, for all processes but one.
    """

    def __init__(self, total_steps: int, *, initial_step: int, enabled: bool) -> None:
        self._total_steps = total_steps
        self._enabled = enabled
        self._bar = tqdm(
            total=total_steps,
            initial=initial_step,
            desc="train",
            unit="step",
            dynamic_ncols=True,
            disable=None if enabled else True,  # None: shown if stderr is a terminal
        )

    def stage(self, name: str) -> None:
        """Shows which stage of the step is running, beside the bar."""
        self._bar.set_postfix_str(name)

    def step_line(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the main numbers of a step on one line, '-' for a missing one, and moves the bar to it."""
        self._bar.update(step - self._bar.n)
        self._print(_format_step(step, self._total_steps, metrics))

    def final_table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints (name, value) rows as two aligned columns."""
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self._print(f"{name:<{width}}  {value}")

    def close(self) -> None:
        """Ends the progress bar; lines can still be printed."""
        self._bar.close()

    def _print(self, line: str) -> None:
        if self._enabled:
            tqdm.write(line)
            sys.stdout.flush()  # a pipe would hold the lines back


def _format_step(step: int, total_steps: int, metrics: Mapping[str, float]) -> str:
    kept, evaluated = (
        _format_number(metrics.get(name), ".0f")
        for name in ("train/num_kept_prompts", "dynamic_sampling/num_evaluated_prompts")
    )
    cells = [
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        f"acc {_format_number(metrics.get('rollout/acc/mean'), '.3f'):>6}",
        f"kept {kept + '/' + evaluated:>9}",
    ]
    for label, name, width, spec in _COLUMNS:
        cells.append(f"{label} {_format_number(metrics.get(name), spec):>{width}}")
    evaluations = [
        f"eval {match[1]} {match[2]} {_format_number(value, '.3f')}"
        for name, value in metrics.items()
        if (match := _EVAL_METRIC.fullmatch(name))
    ]
    return "  ".join(cells + (evaluations or ["eval -"]))


def _format_number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(float(value), spec)
