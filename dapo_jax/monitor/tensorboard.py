"""Host: writes a run for TensorBoard: curves with an overview, histograms, responses and the config."""

import json
import textwrap
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

_BUCKETS = 30
_OWN_OPTIONS = ("workdir", "trainer.experiment_name", "trainer.checkpoint_dir")  # different for every run
_RESULTS = "Results"  # sorts before the other groups of curves and of table columns
_TEXTS = {  # in order of interest
    kind: f"{number}_{kind}" for number, kind in enumerate(("held_out", "best", "worst", "truncated", "any"))
}
EVENTS = "events.out.tfevents.*"  # file names
Histograms = dict[str, dict[str, Any]]  # made by `histogram` and `counted`, by name


def _chart(*tags: str) -> list[Any]:
    """Curves in one chart; tags are regular expressions."""
    return ["Multiline", [f"{tag}$" for tag in tags]]


# TensorBoard hides a chart's legend under "Matches", so titles say which of two curves is which.
LAYOUT = {
    "Overview": {
        "held-out accuracy": _chart(r"(eval|bench)/.*/acc/mean_\d+"),
        "training accuracy, means of groups": _chart("rollout/acc/mean"),
        "reward of trained responses": _chart("critic/rewards/mean"),
        "response length, tokens: max above mean": _chart("response_length/(mean|max)"),
        "share cut off at the limit": _chart("response_length/clip_ratio"),
        "entropy, nats per token": _chart("actor/entropy"),
    },
    "Dynamic sampling": {
        "groups: sampled above kept": _chart("dynamic_sampling/num_evaluated_prompts", "train/num_kept_prompts"),
        "groups dropped, by reason": _chart("dynamic_sampling/filtered_.*"),
        "share of groups dropped": _chart("train/filter_rate"),
        "generation rounds": _chart("train/num_gen_batches"),
        "tokens: sampled above trained": _chart("dynamic_sampling/(generated|trained)_tokens"),
    },
    "Update": {
        "policy loss": _chart("actor/pg_loss"),
        "gradient norm": _chart("actor/grad_norm"),
        "share of tokens clipped": _chart("actor/pg_clipfrac", "actor/pg_clipfrac_lower"),
        "KL divergences, nats per token": _chart("actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"),
        "sampler against training pass (k3)": _chart("rollout_corr/k3_kl"),
        "learning rate": _chart("actor/lr"),
    },
    "Time": {
        "seconds per step": _chart("timing_s/step"),
        "seconds per stage of a step": _chart("timing_s/(gen|reward|old_log_prob|ref|values|update_(critic|actor))"),
        "seconds between steps": _chart("timing_s/(testing|save_checkpoint|write)"),
        "tokens per second and device": _chart("perf/throughput"),
    },
    "Alarms": {"alarms (docs/reliability.md)": _chart("alarm/.*")},
}


class TensorBoard:
    """Event files in `folder`, whose name TensorBoard shows as the run's name.

    What a call adds is on disk when it returns, so a kill loses no point of a curve. TensorBoard hides what earlier
    files hold from `first_step` on. At step 0 earlier files are removed.

    Args:
        first_step: the first step that this start may write; 0 for a new run.
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = list(folder.glob(EVENTS))
        if first_step == 0:
            for path in earlier:
                path.unlink()
            earlier = []
        self._new = not earlier
        self._closed = False
        self._results: frozenset[str] = frozenset()
        # The writer names files by second and host, and overwrites: the suffix keeps two starts apart.
        self._writer = EventsWriter(str(folder / "events"), filename_suffix=f".{len(earlier):04d}")
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
        if self._new:
            self._add(first_step, [summary.custom_scalars(LAYOUT)])

    def add_config(self, config: Mapping[str, Any], results: Collection[str]) -> None:
        """The options of the run, and the metrics that are shown in a group of their own; only a new run writes them.

        TensorBoard's table of runs finds out itself which options differ, shows these first and ticks five. It does
        not where a run says what the columns are. Without that, every curve is a column, in the order of names.

        Args:
            config: value by dotted key.
            results: names of the metrics that runs are compared by.
        """
        self._results = frozenset(results)
        if self._new:
            shown = {
                key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
                for key, value in config.items()
                if key not in _OWN_OPTIONS
            }
            _, start, _ = summary.hparams(shown, {})
            self._add(0, [start])

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each metric's curve. Tags cannot contain "@": `mean@4` is shown as `mean_4`."""
        results = {f"{_RESULTS}/{name}": value for name, value in values.items() if name in self._results}
        self._add(
            step,
            [
                Summary(value=[Summary.Value(tag=_tag(name), simple_value=value)])
                for name, value in [*results.items(), *values.items()]
            ],
        )

    def add_histograms(self, step: int, histograms: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds histograms made by `histogram` or `counted`, by name."""
        self._add(step, [_histogram_summary(name, parts) for name, parts in histograms.items()])

    def add_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Adds responses as text, each "kind" under its own tag; held-out ones, best and worst come first."""
        kinds: dict[str, list[Mapping[str, Any]]] = {}
        for sample in samples:
            kinds.setdefault(str(sample.get("kind", "any")), []).append(sample)
        tags = {kind: f"samples/{_TEXTS.get(kind, kind)}" for kind in kinds}
        self._add(step, [summary.text(tags[kind], _markdown(found)) for kind, found in kinds.items()])

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        if not self._closed:
            self._writer.close()
        self._closed = True

    def _add(self, step: int, summaries: Iterable[Any]) -> None:
        values = [value for one in summaries for value in one.value]
        if values:
            self._write(Event(step=step, summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)
        self._writer.flush()


def event_folder(workdir: Path, *, first_step: int) -> Path:
    """The folder for a run's events: its workdir, whose name TensorBoard shows. A run that an earlier version started
    continues in `tensorboard/`, so that its curves stay in one place.
    """
    earlier = workdir / "tensorboard"
    events = list(earlier.glob(EVENTS))
    if events and first_step > 0:
        return earlier
    for path in events:
        path.unlink()
    with suppress(OSError):  # it does not exist, or holds other files
        earlier.rmdir()
    return workdir


def histogram(values: np.ndarray) -> dict[str, Any]:
    """The finite values in 30 equal buckets, as JSON values: `edges` (lowest, highest), `counts`, `moments`."""
    values = values[np.isfinite(values)].astype(np.float64)
    if not values.size:
        return {}
    counts, edges = np.histogram(values, bins=_BUCKETS)
    return {
        "edges": [float(edges[0]), float(edges[-1])],
        "counts": counts.tolist(),
        "moments": [float(values.sum()), float(np.sum(values**2))],
    }


def counted(counts: np.ndarray, *, low: float, high: float) -> dict[str, Any]:
    """Like `histogram`, from counts [K] in equal buckets from `low` to `high`. Empty buckets at the ends are cut off.

    The moments are computed from the buckets' midpoints.
    """
    filled = np.flatnonzero(counts)
    if not filled.size:
        return {}
    first, end = int(filled[0]), int(filled[-1]) + 1
    edges = np.linspace(low, high, len(counts) + 1)
    middles, kept = (edges[first:end] + edges[first + 1 : end + 1]) / 2, counts[first:end]
    return {
        "edges": [float(edges[first]), float(edges[end])],
        "counts": kept.astype(int).tolist(),
        "moments": [float(kept @ middles), float(kept @ middles**2)],
    }


def _histogram_summary(name: str, parts: Mapping[str, Any]) -> Any:
    if not parts:
        return Summary()
    (low, high), counts, (total, squares) = parts["edges"], parts["counts"], parts["moments"]
    limits = np.linspace(low, high, len(counts) + 1)[1:].tolist()
    return summary.histogram_raw(_tag(name), low, high, sum(counts), total, squares, limits, counts)


def _tag(name: str) -> str:
    return name.replace("@", "_")


def _markdown(samples: Sequence[Mapping[str, Any]]) -> str:
    """Numbers on one line, then each text as a code block, so TensorBoard shows it exactly as sampled."""
    blocks = []
    for number, sample in enumerate(samples):
        texts = {name: value for name, value in sample.items() if isinstance(value, str) and name != "kind"}
        numbers = {name: value for name, value in sample.items() if not isinstance(value, str)}
        blocks.append(f"### {number + 1}")
        blocks += [", ".join(f"{name} **{value:g}**" for name, value in numbers.items())] * bool(numbers)
        blocks += [f"{name}\n\n{textwrap.indent(text, '    ', lambda _: True)}" for name, text in texts.items()]
    return "\n\n".join(blocks)
