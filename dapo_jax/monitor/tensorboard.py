"""Host: writes a run for TensorBoard: curves with an overview, histograms, responses, and options to compare."""

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from dapo_jax.monitor.readable import markdown_table

_BUCKETS = 30
_OWN_OPTIONS = ("workdir", "trainer.experiment_name", "trainer.checkpoint_dir")  # different for every run
_USUAL_OPTIONS = ("actor.optim.lr", "seed")  # in the table of runs also where no two runs differ
_MAIN = "Main"  # sorts before the other groups of curves and of table columns
EVENTS = "events.out.tfevents.*"  # file names
Histograms = dict[str, dict[str, Any]]  # made by `histogram` and `counted`, by name
MAIN_CURVES = {  # title -> metric, in the order in which people look; None: held-out accuracy
    "held-out accuracy": None,
    "training accuracy, means of groups": "rollout/acc/mean",
    "share of groups dropped": "train/filter_rate",
    "response length, tokens": "response_length/mean",
    "entropy, nats per token": "actor/entropy",
    "tokens sampled per step": "dynamic_sampling/generated_tokens",
}


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
        given: keys of options that the command line sets.
    """

    def __init__(self, folder: Path, *, first_step: int, given: Collection[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = list(folder.glob(EVENTS))
        if first_step == 0:
            for path in earlier:
                path.unlink()
            earlier = []
        self._folder, self._given, self._new, self._closed = folder, given, not earlier, False
        self._results: Collection[str] = ()
        # The writer names files by second and host, and overwrites: the suffix keeps two starts apart.
        self._writer = EventsWriter(str(folder / "events"), filename_suffix=f".{len(earlier):04d}")
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
        if self._new:
            self._add(first_step, [summary.custom_scalars(LAYOUT)])

    def add_config(self, config: Mapping[str, Any], results: Collection[str]) -> None:
        """The options that runs are compared by, written by a new run only, and the held-out accuracies of the run.

        TensorBoard's table of runs ticks five options, those that differ first, and the first five curves. It has what
        any run writes, so a run leaves out what it shares with the others (`_compared`).

        Args:
            config: value of every option by dotted key.
            results: names of the metrics that runs are compared by, eval/{task}/acc/mean@n.
        """
        self._results = results
        if self._new:
            _, start, _ = summary.hparams(_compared(config, self._folder, self._given), {})
            self._add(0, [start])

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a point to each metric's curve, and to the main curves, which are in a group of their own.

        Tags cannot contain "@": `mean@4` is shown as `mean_4`.
        """
        points = [*self._main_curves(values).items(), *values.items()]
        self._add(step, [Summary(value=[Summary.Value(tag=_tag(name), simple_value=value)]) for name, value in points])

    def _main_curves(self, values: Mapping[str, float]) -> dict[str, float]:
        """Of MAIN_CURVES, by tag; held-out accuracy is one for each task."""
        found = {}
        for number, (title, metric) in enumerate(MAIN_CURVES.items(), start=1):
            tag = f"{_MAIN}/{number} {title.partition(',')[0]}"  # a card has little room
            tasks = {f"{tag}, {name.removeprefix('eval/').partition('/acc/')[0]}": name for name in self._results}
            curves = tasks if metric is None else {tag: metric}
            found |= {tag: values[name] for tag, name in curves.items() if name in values}
        return found

    def add_histograms(self, step: int, histograms: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds histograms made by `histogram` or `counted`, by name."""
        self._add(step, [_histogram_summary(name, parts) for name, parts in histograms.items()])

    def add_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Adds responses as one table."""
        self._add(step, [summary.text("samples", markdown_table(samples))])

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


def _compared(config: Mapping[str, Any], folder: Path, given: Collection[str]) -> dict[str, Any]:
    """The options that tell a run from others: the usual ones, those of the command line, and those that have another
    value in a run whose work directory is next to `folder`.
    """
    others = []
    for path in folder.parent.glob("*/config.json"):
        with suppress(OSError, ValueError, RecursionError):  # unreadable, or no run's
            found = json.loads(path.read_bytes(), parse_constant=str)
            others.append(traverse_util.flatten_dict(found, sep=".") if isinstance(found, dict) else {})
    named = {*_USUAL_OPTIONS, *given}
    plain = json.loads(json.dumps(config), parse_constant=str)  # lists and "Infinity", as in the files
    return {
        key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for key, value in plain.items()
        if key not in _OWN_OPTIONS and (key in named or any(other.get(key, value) != value for other in others))
    }


def _tag(name: str) -> str:
    return name.replace("@", "_")
