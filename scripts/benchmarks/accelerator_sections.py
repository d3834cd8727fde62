"""Host: the sections of the accelerator report, each in its own process; accelerator_report.py starts them.

    python scripts/benchmarks/accelerator_sections.py NAME --folder DIR [--small]

Writes DIR/NAME.json. This file describes the machine and runs a short training; accelerator_numerics.py checks whether
it computes correctly, and accelerator_rollouts.py and accelerator_benchmarks.py measure speed and memory.
"""

import argparse
import dataclasses
import functools
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import accelerator_benchmarks
import accelerator_numerics
import accelerator_rollouts
import accelerator_variants
import contenders
import numpy as np
from accelerator_findings import Findings
from accelerator_numerics import K3_LIMITS
from random_models import config_json

ROOT = Path(__file__).parents[2]
GIB = 2.0**30
STEPS = 8  # of training
QUICKSTART = "configs/quickstart.py"
ALL_WEIGHTS = {"model.lora.rank": 0, "actor.optim.lr": 1.4e-5}  # instead of the quickstart's adapters


def environment(findings: Findings, folder: Path, *, small: bool) -> None:
    """Versions, devices, and what the automatic options resolve to."""
    import jax

    from dapo_jax.monitor.environment import environment as described
    from dapo_jax.parallel.devices import limits_of

    devices = jax.devices()
    first, found = devices[0], described()
    findings.keep(platform=first.platform, count=len(devices), **found)
    versions = found["versions"] | contenders.versions(("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"))
    versions |= {"the platform": first.client.platform_version, "commit": commit(), "NVIDIA driver": nvidia_driver()}
    for name, text in versions.items():
        if text:
            findings.row("Versions", of=name, version=" ".join(text.split())[:100])
    limits, stats = limits_of(first), first.memory_stats() or {}
    findings.row("Devices", of="what JAX finds", value=found["devices"])
    findings.row("Devices", of="host", value=found["host"])
    findings.row("Devices", of="compute capability", value=getattr(first, "compute_capability", None))
    findings.row("Devices", of="GiB that JAX may take on a device", value=_scaled(stats.get("bytes_limit"), GIB))
    for name, figure, unit in (
        ("GiB of memory, data sheet", limits.memory, GIB),
        ("TFLOP/s of bfloat16 products, data sheet", limits.flops, 1e12),
        ("GB/s of the memory, data sheet", limits.bandwidth, 1e9),
    ):
        findings.row("Devices", of=name, value=_scaled(figure, unit))
    if not limits.is_known and first.platform != "cpu":
        findings.note(f"dapo_jax has no data sheet of {first.device_kind}: shares of its limits are missing below.")
    show_choices(findings)


def show_choices(findings: Findings) -> None:
    """What model.dtype=auto and model.attention=fused resolve to on these devices."""
    from dapo_jax.config.sections import Config
    from dapo_jax.models.hf_architecture import architecture_from_hf
    from dapo_jax.parallel.mesh import make_mesh
    from dapo_jax.run.passes import chosen_attention, compute_dtype

    mesh, config = make_mesh(-1, 1, 1), Config()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="auto", attention="fused"))
    kernel, reason = chosen_attention(
        config.model, config.data, architecture_from_hf(config_json("qwen2.5-0.5b")), mesh
    )
    dtype = compute_dtype(config.model, mesh).name
    for option, chosen, why in (("model.dtype=auto", dtype, ""), ("model.attention=fused", kernel, reason)):
        findings.row("What dapo_jax chooses", option=option, value=chosen, reason=why or None)


def commit() -> str:
    """The checkout's commit, with "+" if files were changed; '' outside a checkout."""
    return _printed(["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+"])


def nvidia_driver() -> str:
    """Version of the driver, '' if there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    return _printed(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).partition("\n")[0]


def training(findings: Findings, folder: Path, *, small: bool) -> None:
    """Eight steps of the quickstart with all weights, or of configs/tiny.py where its model is missing."""
    config, reason = training_config(small=small)
    findings.note(f"`{config}` for {STEPS} steps{reason}.")
    workdir = folder / "training"
    devices = json.loads((folder / "environment.json").read_text(encoding="utf-8"))["data"].get("count", 1)
    options = {
        "workdir": workdir,
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": STEPS,
        "trainer.compilation_cache_dir": "",
        "algorithm.filter_groups.leftover": "requeue",  # groups of older weights would add to k3
        **micro_batches(devices),
    }
    if config == QUICKSTART:
        options |= ALL_WEIGHTS
    options |= {"trainer.test_freq": -1, "trainer.val_before_train": False} if small else {"trainer.test_freq": STEPS}
    command = [sys.executable, "-m", "dapo_jax.train", "--config", config]
    command += [f"--config.{name}={value}" for name, value in options.items()]
    start = time.perf_counter()
    code = subprocess.run(command, cwd=ROOT).returncode
    findings.check("python -m dapo_jax.train: exit code", code, "0", code == 0)
    if code == 0:
        show_training(findings, workdir, time.perf_counter() - start)


def training_config(*, small: bool) -> tuple[str, str]:
    """The config to train, and what the page says of it."""
    from dapo_jax.hub.smollm2 import SMOLLM2

    if small:
        return "configs/tiny.py", ", a random model: the sizes are small"
    if not Path(SMOLLM2).exists():
        return "configs/tiny.py", ", a random model: `dapo-jax train --config quickstart` fetches SmolLM2, once"
    return QUICKSTART, " of all weights"


def micro_batches(devices: int) -> dict[str, Any]:
    """Options that divide a micro-batch of 32 responses among the devices."""
    return {"actor.ppo_micro_batch_size_per_device": max(32 // devices, 1)}


def show_training(findings: Findings, workdir: Path, seconds: float) -> None:
    """Tables and checks of a finished run."""
    from dapo_jax.monitor.records import read_metrics

    rows = read_metrics(workdir)
    steps = [row for row in rows if row["step"] > 0]
    columns = {
        "accuracy": "rollout/acc/mean",
        "loss": "actor/loss",
        "gradient norm": "actor/grad_norm",
        "k3, nats": "rollout_corr/k3_kl",
        "seconds": "timing_s/step",
        "tokens/s of a device": "perf/throughput",
    }
    for row in steps:
        findings.row("Steps", step=row["step"], **{title: row.get(name) for title, name in columns.items()})
    for name in sorted({name for row in steps for name in row if name.startswith("perf/")}):
        values = [row[name] for row in steps[1:] if row.get(name) is not None]
        if values:
            findings.row("Medians without the first step", metric=name, value=float(np.median(values)))
    for row in rows:
        for name, value in row.items():
            if name.startswith("eval/") and "/acc/mean@" in name:
                findings.row("Held-out accuracy", step=row["step"], metric=name, value=value)
    findings.note(f"The whole command took {seconds:.0f} s, with its start and all compilation.")
    findings.check("steps in metrics.jsonl", len(steps), str(STEPS), len(steps) == STEPS)
    numbers = [row.get(name) for row in steps for name in ("actor/loss", "actor/grad_norm")]
    finite = all(value is not None and math.isfinite(value) for value in numbers)
    findings.check("losses and gradient norms are finite", finite, "yes", finite)
    skipped = sum(row.get("actor/skipped_updates", 0) for row in steps)
    findings.check("skipped updates", skipped, "0", skipped == 0)
    worst, limit = max(row.get("rollout_corr/k3_kl", math.inf) for row in steps), K3_LIMITS["bfloat16"]
    findings.check("largest k3 of the training pass and the sampler", worst, f"below {limit:g} nats", worst < limit)


def _printed(command: Sequence[str]) -> str:
    """What a command prints; '' if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


SECTIONS: dict[str, Callable[..., None]] = {
    "environment": environment,
    "attention": accelerator_numerics.attention,
    "tokens": accelerator_numerics.tokens,
    "tokens_on_cpu": accelerator_numerics.tokens_on_cpu,
    "training": training,
    "memory": accelerator_benchmarks.memory,
    "long_tail": accelerator_rollouts.long_tail,
    "variants": accelerator_variants.variants,
    "rows_0.5b": functools.partial(accelerator_rollouts.rollout, size="0.5b", most=3072),
    "rows_1.5b": functools.partial(accelerator_rollouts.rollout, size="1.5b", most=1024),
} | {
    f"{part.__name__}_{size}": functools.partial(part, size=size)
    for part in (accelerator_rollouts.rollout, accelerator_benchmarks.update)
    for size in accelerator_benchmarks.SIZES
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SECTIONS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(arguments)
    if args.name != "training":  # which starts the command that does this
        from dapo_jax.config.sections import Config
        from dapo_jax.parallel.memory import reserve_gpu_memory

        reserve_gpu_memory(Config().trainer.gpu_memory_fraction)
    SECTIONS[args.name](Findings(args.folder / f"{args.name}.json"), args.folder, small=args.small)


if __name__ == "__main__":
    main()
