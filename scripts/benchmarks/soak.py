"""Runs a small model for many steps and checks that nothing grows.

    python scripts/benchmarks/soak.py [--steps 1000] [--json FILE] [--config configs/tiny.py] [--config.key=value ...]

After every step it measures resident memory, JAX's live arrays and their bytes, open files, threads and processes. The
minimum of a count in the last quarter must not exceed that in the second: what a background write of a
checkpoint holds for a while is not growth, what stays is. The median of memory may grow by 2 %, because the allocator
keeps some.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("soak")

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dapo_jax.command.command_line import read_config, refusals
from dapo_jax.training.loop import train

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (  # the policy stays as it is, so that the filter keeps as many groups at the end as at the beginning
    "--config.actor.optim.lr=0",
    "--config.trainer.test_freq=10",
    "--config.trainer.save_freq=10",
    "--config.algorithm.filter_groups.max_num_gen_batches=0",
    "--config.data.arithmetic.high=4",
    "--config.data.arithmetic.num_heldout=8",
)
COUNTS = ("live arrays", "live array bytes", "open files", "threads", "processes")
MEMORY_SLACK = 0.02  # of the memory itself: what an allocator keeps or gives back


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--config", default=str(ROOT / "configs" / "tiny.py"))
    given, options = parser.parse_known_args(arguments)
    seen: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as workdir:
        of_run = [f"--config.workdir={workdir}", f"--config.trainer.total_training_steps={given.steps}"]
        config = read_config(["train", f"--config={given.config}", *of_run, *SETTINGS, *options])
        train(config, on_step=lambda step, metrics: seen.append(in_use()))
    figures, grown = compare(seen)
    print(json.dumps(figures, indent=2))
    print(f"grown after {given.steps} steps: {', '.join(grown) or 'nothing'}")
    if given.json is not None:
        given.json.write_text(json.dumps({"steps": given.steps, "figures": figures, "grown": grown}, indent=2) + "\n")
    return 1 if grown else 0


def in_use() -> dict[str, float]:
    """What this process holds (Linux)."""
    gc.collect()
    arrays = jax.live_arrays()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "resident MB": int(status["VmRSS"].split()[0]) / 1e3,
        "live arrays": len(arrays),
        "live array bytes": sum(array.nbytes for array in arrays),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "processes": sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children")),
    }


def compare(seen: Sequence[dict[str, float]]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Minimum and maximum in the second and in the last quarter, and the names of the figures that have grown."""
    quarter = len(seen) // 4
    figures: dict[str, dict[str, Any]] = {}
    grown: list[str] = []
    for name in seen[0]:
        values = np.array([step[name] for step in seen])
        second, last = values[quarter : 2 * quarter], values[-quarter:]
        figures[name] = {
            "second quarter": [float(second.min()), float(second.max())],
            "last quarter": [float(last.min()), float(last.max())],
        }
        if name in COUNTS:
            if last.min() > second.min():
                grown.append(name)
        else:
            slope = np.polyfit(np.arange(len(values) - 2 * quarter), values[2 * quarter :], 1)[0]
            figures[name]["MB a step in the second half"] = float(slope)
            if np.median(last) > np.median(second) * (1 + MEMORY_SLACK):
                grown.append(name)
    return figures, grown


if __name__ == "__main__":
    with refusals(sys.argv):
        sys.exit(main())
