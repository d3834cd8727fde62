"""Host: what a person, or a program that reads stdout, sees of a run: a progress bar, a line a step, a final table."""

import re
import sys
from collections.abc import Mapping, Sequence

from tqdm import tqdm

from dapo_jax.monitor.records import to_json_line

MODES = ("steps", "detailed", "quiet", "json")
Value = float | str | Mapping[str, float] | None

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
_TOKENS = {  # that a stage goes through
    "gen": "dynamic_sampling/generated_tokens",
    **dict.fromkeys(("old_log_prob", "ref", "values", "update_critic", "update_actor"), "perf/total_num_tokens"),
}


class Console:
    """Progress bar (stderr, only on a terminal) and result lines (stdout).

    The bar counts training steps and names the stage that is running, with its speed in the step before.

    Args:
        total_steps: training steps of the whole run.
        initial_step: steps done before this start, 0 for a new run.
        enabled: False shows nothing, for all processes but one.
        mode: steps, detailed: bar, a line a step and a table. quiet: the table alone. json: no bar, the metrics of a
            step as a JSON object a line, and at the end {"summary": {name: value}}.
    """

    def __init__(self, total_steps: int, *, initial_step: int, enabled: bool, mode: str = "steps") -> None:
        self._total_steps = total_steps
        self._enabled = enabled
        self._mode = mode
        self._speeds: dict[str, str] = {}
        self._bar = tqdm(
            total=total_steps,
            initial=initial_step,
            desc="train",
            unit="step",
            dynamic_ncols=True,
            disable=None if enabled and mode in ("steps", "detailed") else True,  # None: shown if stderr is a terminal
        )

    def stage(self, name: str) -> None:
        """Shows which stage of the step is running, beside the bar."""
        self._bar.set_postfix_str(f"{name} {self._speeds.get(name, '')}".rstrip())

    def step_line(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the main numbers of a step on one line, '-' for a missing one, and moves the bar to it."""
        self._speeds |= _speeds(metrics)
        self._bar.update(step - self._bar.n)
        if self._mode == "json":
            self._print(to_json_line({"step": step, **metrics}).rstrip("\n"))
        elif self._mode != "quiet":
            self._print(_format_step(step, self._total_steps, metrics))

    def final_table(self, rows: Sequence[tuple[str, Value]]) -> None:
        """Prints (name, value) rows as two aligned columns, or as one JSON object."""
        if self._mode == "json":
            self._print(to_json_line({"summary": dict(rows)}).rstrip("\n"))
            return
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self._print(f"{name:<{width}}  {_format_value(value)}")

    def close(self) -> None:
        """Ends the progress bar; lines can still be printed."""
        self._bar.close()

    def _print(self, line: str) -> None:
        if self._enabled:
            tqdm.write(line)
            sys.stdout.flush()  # a pipe would hold the lines back


def _speeds(metrics: Mapping[str, float]) -> dict[str, str]:
    """Tokens a second of each stage that goes through tokens, the seconds of every other."""
    speeds = {}
    for metric, seconds in metrics.items():
        area, _, stage = metric.partition("/")
        if area == "timing_s" and seconds > 0:
            tokens = metrics.get(_TOKENS.get(stage, ""))
            speeds[stage] = f"{seconds:.1f} s" if tokens is None else f"{tokens / seconds:,.0f} tokens/s"
    return speeds


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
    return "-" if value is None else format(value, spec)


def _format_value(value: Value) -> str:
    """Counts with thousands separated, measures with three digits, the parts of a mapping rounded."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {part:.0f}" for name, part in value.items())
    if isinstance(value, str):
        return value
    return _format_number(value, "," if isinstance(value, int) else ".3f")
