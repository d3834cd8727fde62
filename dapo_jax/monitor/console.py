"""Host: what a person or a program sees of a run: a progress bar, one line per step, a final table."""

import functools
import shlex
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from tqdm import tqdm

from dapo_jax.errors import printable
from dapo_jax.monitor.bars import WIDTH, person_bar
from dapo_jax.monitor.records import to_json_line
from dapo_jax.monitor.statistics import HELD_OUT

MODES = ("steps", "detailed", "quiet", "json")
Value = float | str | Mapping[str, float] | None

# name: the text around the values, and each value's metric, width and maximum number of decimals
_COLUMNS: Mapping[str, tuple[str, Sequence[tuple[str, int, int]]]] = {
    "acc": ("acc {}", [("rollout/acc/mean", 5, 3)]),
    "kept": (
        "kept {} of {}",
        [("train/num_kept_prompts", 4, 0), ("dynamic_sampling/num_evaluated_prompts", 4, 0)],
    ),
    "len": ("len {}", [("response_length/mean", 5, 1)]),
    "turns": ("turns {}", [("rollout/num_turns/mean", 4, 2)]),
    "entropy": ("entropy {}", [("actor/entropy", 5, 3)]),
    "grad": ("grad {}", [("actor/grad_norm", 5, 3)]),
    "clip": ("clip {}", [("actor/pg_clipfrac", 5, 3)]),
    "time": ("{}s", [("timing_s/step", 5, 1)]),
    "speed": ("{} tok/s", [("perf/throughput", 5, 0)]),
}
STAGES = {  # timer name -> what the bar and the report say; `other` is the report's
    "load": "loading the model",
    "gen": "sampling",
    "reward": "verifying",
    "shape": "shaping rewards",
    "filter": "filtering groups",
    "batch": "padding rows",
    "old_log_prob": "computing log-probabilities",
    "ref": "computing the reference's log-probabilities",
    "values": "computing values",
    "teacher": "asking the teacher",
    "adv": "computing advantages",
    "update_actor": "updating the policy",
    "update_critic": "updating the critic",
    "update_weights": "preparing the weights for sampling",
    "testing": "evaluating",
    "write": "writing records",
    "save_checkpoint": "saving a checkpoint",
    "other": "the rest of the steps",
}
_OF_SAMPLING = ("gen", "reward", "shape", "filter")  # stages that take turns until a step has its groups
LONG_S = 30.0  # after which a stage has a line of its own; the next ones come after twice, four times, ... as long


class Console:
    """Progress bar (on a terminal's stderr, or in a notebook) and result lines (stdout).

    The bar counts training steps and names the current stage, with its speed in the previous step.

    Args:
        total_steps: training steps of the whole run.
        initial_step: steps done before this start, 0 for a new run.
        enabled: False shows nothing, for all processes but one.
        mode: steps, detailed: a bar, a line per step and a table. quiet: only the table. json: no bar, each step's
            metrics as a JSON object on one line, and at the end {"summary": {name: value}}.
        constant: columns to leave out because they never change in this run: "kept" without a filter, "clip" with one
            update per step of new samples, "turns" without an environment.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        initial_step: int,
        enabled: bool,
        mode: str = "steps",
        constant: Collection[str] = (),
    ) -> None:
        self._total_steps = total_steps
        self._columns = _columns_that_fit(len(self._step(0)), [name for name in _COLUMNS if name not in constant])
        self._enabled = enabled
        self._mode = mode
        self.shows_stages = enabled and mode in ("steps", "detailed")
        self._speeds: dict[str, str] = {}
        self._stage = self._detail = self._compiling = ""  # shown after the bar
        self._work = ""  # a stage, or all those of sampling together
        self._timer = threading.Timer(0, lambda: None)
        self._bar = person_bar(shown=False)  # until the first stage or step: a run that is refused before leaves no bar
        self._open_bar: Callable[[], tqdm] | None = functools.partial(
            person_bar,
            shown=self.shows_stages,
            total=total_steps,
            initial=initial_step,
            desc="train",
            unit="step",
            bar_format="{desc} {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",  # leaves room for the stage
        )

    def stage(self, name: str) -> None:
        """Shows the current stage of the step, with its speed in the previous step. The first one begins the bar."""
        self._begin()
        self._stage = f"{STAGES.get(name, name)} {self._speeds.get(name, '')}".rstrip()
        before, self._work = self._work, STAGES["gen" if name in _OF_SAMPLING else name]
        if self._work != before:
            self._watch(LONG_S)
        self._refresh()

    def note(self, text: str) -> None:
        """Prints a line that explains the step lines. Mode "detailed" shows the log instead, which has it too."""
        if self._mode == "steps":
            self._print(text)

    def detail(self, text: str) -> None:
        """Shows the progress within the step, until its line is printed."""
        self._detail = text
        self._refresh()

    def compiling(self, text: str) -> None:
        """Shows what is being compiled; nothing if `text` is empty."""
        self._compiling = text
        self._refresh()

    def _watch(self, seconds: float) -> None:
        """Where no bar shows the work, a line says what is being done if it takes `seconds` more."""
        self._timer.cancel()
        if self._work and self.shows_stages and self._bar.disable:
            self._timer = threading.Timer(seconds, self._say_what_lasts, (seconds,))
            self._timer.daemon = True
            self._timer.start()

    def _say_what_lasts(self, seconds: float) -> None:
        rounds = self._detail if self._work == STAGES["gen"] else ""
        what = ", ".join(filter(None, (rounds, self._compiling)))
        self._print(f"{self._work}{what and f': {what}'} ({2 * seconds - LONG_S:.0f} s)")
        self._watch(2 * seconds)

    def _refresh(self) -> None:
        self._bar.set_postfix_str("; ".join(filter(None, (self._stage, self._detail, self._compiling))))

    def step_line(self, step: int, metrics: Mapping[str, float], *, trained: bool = True) -> None:
        """Prints the main numbers of a step on one line, '-' for a missing one, and moves the bar to the step.

        Evaluations get lines of their own; if not `trained`, there are no others. No line is longer than WIDTH.
        """
        self._begin()
        self._speeds |= _speeds(metrics)
        self._stage = self._detail = self._work = ""
        self._watch(LONG_S)
        self._bar.set_postfix_str(self._compiling, refresh=False)
        self._bar.update(step - self._bar.n)
        if self._mode == "json":
            self._print(to_json_line({"step": step, **metrics}).rstrip("\n"))
        elif self._mode != "quiet":
            cells = [_cell(name, metrics) for name in self._columns]
            if step and trained:  # step 0 has trained on nothing
                self._print("  ".join([self._step(step), *cells]))
            for line in _evaluation_lines(metrics, WIDTH - len(self._step(0)) - 2):
                self._print(f"{self._step(step)}  {line}")

    def final_table(self, rows: Sequence[tuple[str, Value]], *, report: str = "") -> None:
        """Prints (name, value) rows as two aligned columns, then how to see the `report` on a workdir, or as JSON."""
        if self._mode == "json":
            self._print(to_json_line({"summary": dict(rows)}).rstrip("\n"))
            return
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self._print(f"{name:<{width}}  {_format_value(value)}")
        if report and self._mode != "quiet":
            self._print(f"done: dapo-jax report {shlex.quote(report)}")

    def close(self) -> None:
        """Ends the progress bar; lines can still be printed."""
        self._timer.cancel()
        self._bar.close()
        self._open_bar = None

    def _begin(self) -> None:
        if self._open_bar is not None:
            self._bar, self._open_bar = self._open_bar(), None

    def _step(self, step: int) -> str:
        return f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"

    def _print(self, line: str) -> None:
        if self._enabled:
            tqdm.write(printable(line))
            sys.stdout.flush()  # a pipe would buffer the lines


def _speeds(metrics: Mapping[str, float]) -> dict[str, str]:
    """Tokens per second of each stage that processes tokens, seconds of the others."""
    speeds = {}
    for metric, seconds in metrics.items():
        area, _, stage = metric.partition("/")
        if area == "timing_s" and seconds > 0:
            per_token = None if stage == "adv" else metrics.get(f"timing_per_token_ms/{stage}")
            speeds[stage] = f"{seconds:.1f} s" if per_token is None else f"{1000 / per_token:,.0f} tokens/s"
    return speeds


def _columns_that_fit(taken: int, names: Sequence[str]) -> list[str]:
    """The first columns that fit into WIDTH after `taken` characters."""
    chosen = []
    for name in names:
        taken += 2 + len(_cell(name, {}))
        if taken > WIDTH:
            break
        chosen.append(name)
    return chosen


def _cell(name: str, metrics: Mapping[str, float]) -> str:
    text, values = _COLUMNS[name]
    widest = text.format(*("9" * width for _, width, _ in values))
    filled = text.format(*(_fitted(metrics.get(metric), width, most) for metric, width, most in values))
    label = text[: text.index("{")]
    return label + filled.removeprefix(label).rjust(len(widest) - len(label))


def aligned(rows: Sequence[Mapping[str, str]]) -> str:
    """A table with the keys of the rows as its head, in columns; "-" where a row has no such key."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([row.get(name, "-") for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _fitted(value: float | None, width: int, most: int) -> str:
    """`value` in at most `width` characters, with up to `most` decimals as they fit; 1e9 is "1e9".

    It gets more decimals only where it would look like zero.
    """
    if value is None:
        return "-"
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    short = f"{mantissa}e{int(exponent)}" if exponent else mantissa
    texts = [f"{value:.{decimals}f}" for decimals in range(most, -1, -1)]
    if value and float(texts[0]) == 0:  # not zero, but looks like it
        longest = f"{value:.{width - len(f'{value:.0f}') - 1}f}"
        texts.insert(0, longest if float(longest) else short)
    return next((text for text in [*texts, short] if len(text) <= width), "-")


def _evaluation_lines(metrics: Mapping[str, float], width: int) -> list[str]:
    """The held-out accuracy of each task set, as many per line as fit."""
    found = ((HELD_OUT.fullmatch(name), value) for name, value in metrics.items())
    parts = [f"eval {match[1]} mean@{match[2]} {value:.3f}" for match, value in found if match]
    lines: list[str] = []
    for part in parts:
        if len(part) > width:  # a task set's name may be long
            part = f"eval ...{part[len(part) - width + 8 :]}"
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def _format_value(value: Value) -> str:
    """Counts with thousands separators, measures with three decimals, the stages of a mapping without zeros."""
    if isinstance(value, Mapping):
        return ", ".join(f"{STAGES.get(name, name)} {part:.0f}" for name, part in value.items() if part >= 0.5) or "-"
    if isinstance(value, str):
        return value
    return "-" if value is None else format(value, "," if isinstance(value, int) else ".3f")
