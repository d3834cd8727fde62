"""Kills a run at random moments, restarts it each time, and checks that the result equals an uninterrupted run.

    python scripts/benchmarks/crash_test.py [--kills 25] [--seed 0] [--config configs/tiny.py] [--config.key=value ...]

One run is never killed. The other is killed by SIGKILL while it samples, verifies, updates, evaluates, writes a
checkpoint or writes records, and restarted by the same command. Then both must have the same parameters and optimizer
state and the same metrics (except timings) bit for bit, each step once in metrics.jsonl, each round once in train.log,
and one curve in TensorBoard.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CLOCK = ("time/", "timing", "perf/", "environment/time_s/", "dynamic_sampling/first_release_s")
OF_A_RUN = {"log_bytes", "run", "workdir", "started_at", "saved_at", "step_seconds", "lost_seconds"}  # of Progress
OF_A_RUN |= {"stream", "record"}  # checksums, also of memory that is free
STAGES = ("gen", "reward", "update_actor", "testing", "save_checkpoint", "records", "anywhere")
LONGEST_WAIT_S = 600.0  # for a stage to begin
DEFAULTS = {  # many short steps, and groups that are carried from one to the next, so that there is much to lose
    "data.arithmetic.operators": "+",  # sums, which it does not solve
    "data.arithmetic.high": "4",
    "data.arithmetic.num_heldout": "4",
    "data.max_response_length": "4",
    "data.train_batch_size": "4",
    "data.gen_batch_size": "16",
    "actor.ppo_mini_batch_size": "2",
    "actor.ppo_micro_batch_size_per_device": "32",
    "algorithm.filter_groups.leftover": "carry",
    "algorithm.filter_groups.max_num_gen_batches": "0",
    "reward.num_workers": "1",
    "trainer.total_training_steps": "120",
    "trainer.save_freq": "2",
    "trainer.test_freq": "3",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--config", default=str(ROOT / "configs" / "tiny.py"))
    parser.add_argument("--folder", help="where the two runs are kept; a temporary one unless given")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    given, options = parser.parse_known_args(arguments)
    if given.child is not None:
        return run_and_tell(given.child, given.config, options)
    folder = Path(given.folder or tempfile.mkdtemp(prefix="crash_test_"))
    options = [f"--config.{name}={value}" for name, value in DEFAULTS.items()] + options
    try:
        return crash(folder, given.config, options, given.kills, random.Random(given.seed))
    finally:
        if given.folder is None:
            shutil.rmtree(folder)


def crash(folder: Path, config: str, options: list[str], kills: int, dice: random.Random) -> int:
    """The exit code: 0 if both runs are identical."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, killed = folder / "undisturbed", folder / "killed"
    start = time.monotonic()
    with Child(whole, config, options) as child:
        seconds = child.durations()
    if child.process.returncode:
        raise RuntimeError(f"the uninterrupted run failed, see {whole / 'train.log'}")
    print(f"uninterrupted: {time.monotonic() - start:.0f} s", flush=True)
    hit: Counter[str] = Counter()
    lost = 0
    for number in range(kills):
        stage = STAGES[number % len(STAGES)]
        with Child(killed, config, options) as child:
            inside = child.kill_in(stage, dice, seconds)
        if inside is None:
            raise RuntimeError(f"the run ended after {number} kills: raise trainer.total_training_steps")
        hit[inside] += 1
        rows, newest = metric_rows(killed), max(saved_steps(killed), default=0)
        lost += max((row["step"] for row in rows), default=0) - newest
        print(f"kill {number + 1} of {kills}: {inside}; {len(rows)} rows, checkpoint {newest}", flush=True)
    with Child(killed, config, options) as child:
        child.durations()
    if child.process.returncode:
        raise RuntimeError(f"the run did not end well after {kills} kills, see {killed / 'train.log'}")
    problems = list(differences(whole, killed))
    told = ", ".join(f"{count} x {stage}" for stage, count in hit.items())
    print("\n".join(problems) or f"no difference after {kills} kills: {told}")
    print(f"{lost} steps were repeated; {time.monotonic() - start:.0f} s in all")
    return 1 if problems else 0


class Child:
    """The training command in a process that reports each stage as it begins."""

    def __init__(self, workdir: Path, config: str, options: list[str]) -> None:
        reading, writing = os.pipe()
        self._told = os.fdopen(reading, "r")
        command = [sys.executable, __file__, f"--child={writing}", f"--config={config}", *options]
        with open(workdir.with_suffix(".out"), "ab") as output:
            self.process = subprocess.Popen(
                [*command, f"--config.workdir={workdir}"], pass_fds=[writing], stdout=output, stderr=output
            )
        os.close(writing)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exception: object) -> None:
        if any(exception):
            self.process.kill()
        self._told.close()
        self.process.wait()

    def durations(self) -> dict[str, float]:
        """Seconds of the median visit to each stage, without the first two, which compile; once the run has ended."""
        spent: dict[str, list[float]] = {}
        visits: Counter[str] = Counter()
        stage, since = "", time.monotonic()
        for line in self._told:
            now = time.monotonic()
            if visits[stage] > 2:
                spent.setdefault(stage, []).append(now - since)
            stage, since = line.strip(), now
            visits[stage] += 1
        return {stage: statistics.median(seconds) for stage, seconds in spent.items()}

    def kill_in(self, stage: str, dice: random.Random, seconds: dict[str, float]) -> str | None:
        """Kills the process at a random moment of a visit to `stage`. The stage it was in, None if it had ended."""
        deadline = time.monotonic() + LONGEST_WAIT_S
        left, now_in = dice.randint(1, 4), "start"
        if stage == "anywhere":
            left, stage = 1, ""
        for line in self._told:
            now_in = line.strip()
            left -= stage in ("", now_in)
            if left <= 0 or time.monotonic() > deadline:
                break
        else:
            return None
        longest = 1.5 * seconds.get(now_in, 0.0) if stage else 8.0
        time.sleep(dice.choice([0.0, dice.uniform(0, longest)]) if stage else dice.uniform(0, longest))
        if self.process.poll() is not None:
            return None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        later = self._told.read().split()
        return later[-1] if later else now_in


def run_and_tell(descriptor: int, config: str, options: list[str]) -> int:
    """The training command; the name of each stage goes to `descriptor` as it begins."""
    from dapo_jax.monitor.console import Console
    from dapo_jax.monitor.records import RunRecords
    from dapo_jax.training import loop as train

    def tell(name: str) -> None:
        os.write(descriptor, f"{name}\n".encode())

    staged, written = Console.stage, RunRecords.write

    def stage(self: Console, name: str) -> None:
        tell(name)
        staged(self, name)

    def write(self: RunRecords, step: int, metrics: Mapping[str, Any]) -> None:
        tell("records")
        written(self, step, metrics)

    Console.stage, RunRecords.write = stage, write
    os.set_inheritable(descriptor, False)
    sys.argv = ["train", f"--config={config}", *options]
    tell("start")
    train.main()
    return 0


def differences(whole: Path, killed: Path) -> Iterator[str]:
    """The differences between the two runs."""
    rows, others = metric_rows(whole), metric_rows(killed)
    if [row["step"] for row in others] != [row["step"] for row in rows]:
        yield f"the steps of metrics.jsonl differ: {[row['step'] for row in others]}"
    for row, other in zip(rows, others, strict=False):
        names = [name for name in row | other if not name.startswith(CLOCK) and row.get(name) != other.get(name)]
        yield from (f"step {row['step']}: {name} is {other.get(name)}, not {row.get(name)}" for name in names)
    arrays, found = last_checkpoint(whole), last_checkpoint(killed)
    for name in sorted(arrays | found):
        if name not in arrays or name not in found or arrays[name] != found[name]:
            yield f"{name} of the last checkpoint differs"
    if rounds(whole) != rounds(killed):
        yield "train.log has other rounds of sampling"
    if curves(whole) != curves(killed):
        yield "TensorBoard shows other curves"
    if list((killed / "checkpoints").glob("*tmp*")):
        yield "a half-written checkpoint is left"


def metric_rows(workdir: Path) -> list[dict]:
    from dapo_jax.monitor.records import read_metrics

    return read_metrics(workdir) if (workdir / "metrics.jsonl").exists() else []


def rounds(workdir: Path) -> list[str]:
    """The lines of train.log about each round of sampling."""
    return re.findall(r"Step \d+, Gen batch .*", (workdir / "train.log").read_text())


def saved_steps(workdir: Path) -> list[int]:
    return [int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()]


def last_checkpoint(workdir: Path) -> dict[str, bytes]:
    """What the newest checkpoint holds, by name: parameters, moments, prompt cursor, carried groups, counters.

    Without what differs between two runs: free memory at the start, the size of the log, the clock, who saved it.
    """
    import jax
    import orbax.checkpoint as ocp

    newest = max(saved_steps(workdir))
    place = workdir.absolute() / "checkpoints" / str(newest)
    with ocp.PyTreeCheckpointer() as reader:
        tree = {name: reader.restore(place / name) for name in ("models", "stream")}
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {jax.tree_util.keystr(path): jax.device_get(leaf).tobytes() for path, leaf in leaves}
    progress = json.loads((place / "progress" / "metadata").read_text())
    found |= {name: json.dumps(value).encode() for name, value in progress.items()}
    return {name: value for name, value in found.items() if "free_bytes" not in name and name not in OF_A_RUN}


def curves(workdir: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of each scalar that TensorBoard shows, clocks apart; a new start hides what came from its step on."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

    from dapo_jax.monitor.tensorboard import EVENTS

    points: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(workdir.glob(EVENTS), key=lambda path: path.name.rpartition(".")[2]):
        data, position = path.read_bytes(), 0
        while position + 12 <= len(data):
            (length,) = struct.unpack_from("<Q", data, position)
            event = Event.FromString(data[position + 12 : position + 12 + length])
            position += 16 + length
            if position > len(data):
                break  # cut off by the kill
            if event.session_log.status == SessionLog.START:
                points = {tag: [point for point in curve if point[0] < event.step] for tag, curve in points.items()}
            for value in event.summary.value:
                if value.HasField("simple_value") and not value.tag.startswith(CLOCK):
                    points.setdefault(value.tag, []).append((event.step, value.simple_value))
    return {tag: curve for tag, curve in points.items() if curve}


if __name__ == "__main__":
    sys.exit(main())
