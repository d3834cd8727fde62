"""Host: the sections of the accelerator report that measure the update, its memory and the memory's forecast.

They measure like benchmark_update.py, with random weights in bfloat16, on all devices.
"""

import argparse
import json
import math
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import benchmark_update
import numpy as np
from accelerator_findings import Findings
from accelerator_shares import show_shares
from contenders import device_limits, seconds_of
from random_models import config_json

DTYPE, GROUP, REPEATS = "bfloat16", 8, 3
SIZES = {"0.5b": "qwen2.5-0.5b", "1.5b": "qwen2.5-1.5b"}
STAND_INS = {"0.5b": "report-stand-in-0.5b", "1.5b": "report-stand-in-1.5b"}  # for --small
GIB = 2.0**30
FORECAST_SLACK = 1.05  # preflight/report.py calls 95 % of a device's memory usable


def architecture(shape: str) -> Any:
    """The architecture of a name in random_models.SHAPES."""
    from dapo_jax.models.hf_architecture import architecture_from_hf

    return architecture_from_hf(config_json(shape))


def update(findings: Findings, folder: Path, *, small: bool, size: str) -> None:
    """Gradients of all micro-batches and an optimizer step: tokens per second, and the share of peak FLOP/s."""
    import jax

    from dapo_jax.models.weights import count_params

    shape, devices = (STAND_INS if small else SIZES)[size], jax.device_count()
    arch, found = architecture(shape), update_case(shape, small=small)
    if found is None:
        findings.keep(skipped=f"{shape} does not fit {devices} x {gib(memory_limit())}")
        return
    args, options = found
    rows = f"{args.batch} rows of {args.prompt_length} + {args.lengths} tokens, {args.micro // devices} at a time"
    findings.note(
        f"{shape}, random weights, products in {DTYPE}, weights and AdamW's moments in float32: {rows} on "
        "each device; the backward pass computes layers again. Seconds are those of all gradients and one optimizer "
        f"step, the median of {REPEATS} after a first call. MFU is the model's FLOPs / (seconds x devices x peak): 6 "
        "per layer weight and token, 6 per head weight and response token, and 6 x layers x heads x head size x "
        "length^2 per row for causal attention; what is computed again does not count."
    )
    ours = benchmark_update.Ours(args, DTYPE, options)
    first, seconds, tokens = measured(ours, "")
    peak_flops = device_limits().flops
    flops = model_flops(arch, args)
    findings.row(
        "Update",
        devices=devices,
        parameters=count_params(arch),
        attention=attention_of(ours.run),
        **{"first call, s": first},
        seconds=seconds,
        **{
            "tokens/s": tokens / seconds,
            "TFLOP/s of a device": flops / seconds / devices / 1e12,
            "share of the peak (MFU)": flops / (seconds * devices * peak_flops) if peak_flops is not None else None,
            "peak GiB": peak_gib(),
        },
    )
    findings.keep(update={"args": vars(args), "options": options, "peak": peak_bytes()})
    finite = all(bool(np.isfinite(leaf).all()) for leaf in first_leaves(ours.models.actor.params))
    findings.check(f"{shape}: norms after {REPEATS + 1} updates are finite", finite, "yes", finite)
    show_shares(findings, lambda: ours(""), "update")


def update_case(shape: str, *, small: bool) -> tuple[argparse.Namespace, dict[str, Any]] | None:
    """What an update is measured on, with options of the config; None if it does not fit."""
    import jax

    devices, chunk = jax.device_count(), logits_chunk()
    prompt, length = (8, 24) if small else (512, 1536)
    micro = micro_batch_that_fits(architecture(shape), prompt + length, devices, chunk)
    if not micro:
        return None
    batch = math.lcm(micro * devices * (2 if small else 4), GROUP)
    given = {
        "shape": shape,
        "batch": batch,
        "group": GROUP,
        "prompt_length": prompt,
        "lengths": str(length),
        "micro": micro * devices,
    }
    options = {
        "actor.share_prompts": False,
        "actor.logprob_chunk_size": chunk,
        "mesh.data": 1,
        "mesh.fsdp": devices,
        "reward.num_workers": 1,
    }
    return argparse.Namespace(**given), options


def measured(ours: Any, case: str) -> tuple[float, float, int]:
    """Seconds of a contender's first call and of the median of those that follow, and the tokens of a call."""
    first = seconds_of(lambda: ours(case))
    results = [ours(case) for _ in range(REPEATS)]
    return first, statistics.median(seconds for _, seconds in results), results[0][0]


def logits_chunk() -> int:
    """Tokens whose logits exist at a time: the default, or a quarter where memory is scarce."""
    limit = memory_limit()
    return 4096 if limit is None or limit >= 40 * GIB else 1024


def micro_batch_that_fits(arch: Any, length: int, devices: int, chunk: int) -> int:
    """Rows of a micro-batch on a device: 8, or fewer where memory asks for it; 0: not even the state fits."""
    from dapo_jax.models.weights import count_params

    limit = memory_limit()
    if limit is None:
        return 2
    logits = 3 * 4 * chunk * arch.vocab_size  # three float32 arrays of a chunk
    row = 4 * length * (arch.num_layers * arch.hidden_size + 6 * arch.intermediate_size + 8 * arch.hidden_size)
    left = 0.9 * limit - 18 * count_params(arch) / devices - logits  # weights, moments, gradients, a copy in 16 bits
    return next((rows for rows in (8, 4, 2, 1) if rows * row <= left), 0)


def model_flops(arch: Any, args: argparse.Namespace) -> float:
    """FLOPs of an update, by the formula on the page."""
    length = args.prompt_length + int(args.lengths)
    attention = 6.0 * arch.num_layers * arch.num_heads * arch.head_dim * args.batch * length**2
    return benchmark_update.least_flops(arch, args) + attention


def attention_of(run: Any) -> str:
    """What computes the attention of a run's training passes."""
    from dapo_jax.run.passes import chosen_attention

    return chosen_attention(run.config.model, run.config.data, run.arch, run.learner.mesh)[0]


def first_leaves(params: Any) -> list[np.ndarray]:
    """A few small arrays of the parameters."""
    import jax

    leaves = sorted(jax.tree.leaves(params), key=lambda leaf: leaf.size)
    return [np.asarray(jax.device_get(leaf)) for leaf in leaves[:3]]


def memory(findings: Findings, folder: Path, *, small: bool) -> None:
    """The preflight's forecast for the updates that were measured, and what they used."""
    findings.note(
        "The forecast is the preflight's largest program of the update, for the config that was measured and these "
        "devices; the measured peak is the most that JAX held on a device in the process of the update. A CPU does not "
        "say what it held."
    )
    for size in SIZES:
        path = folder / f"update_{size}.json"
        measured = json.loads(path.read_text(encoding="utf-8"))["data"].get("update") if path.exists() else None
        if measured is None:
            findings.note(f"The update of {size} was not measured.")
            continue
        args, peak = argparse.Namespace(**measured["args"]), measured["peak"]
        worst = forecast(args, measured["options"])
        findings.row(
            "GiB of a device",
            shape=args.shape,
            program=worst.program.name,
            **{kind: bytes_ / GIB for kind, bytes_ in worst.bytes.items() if "cache" not in kind},
            forecast=worst.total / GIB,
            **{
                "measured peak": peak / GIB if peak is not None else None,
                "measured / forecast": peak / worst.total if peak is not None else None,
            },
        )
        if peak is not None:
            findings.check(
                f"{args.shape}: measured peak / forecast",
                peak / worst.total,
                f"at most {FORECAST_SLACK:g}",
                peak <= FORECAST_SLACK * worst.total,
            )


def forecast(args: argparse.Namespace, options: dict[str, Any]) -> Any:
    """The update's largest program by the preflight's account. Nothing is allocated."""
    from dapo_jax.parallel.mesh import Meshes
    from dapo_jax.preflight.compiled import compile_program
    from dapo_jax.preflight.lengths import all_longest
    from dapo_jax.preflight.programs import step_programs

    with ExitStack() as stack:
        run = benchmark_update.open_random_run(stack, args, DTYPE, options)
        step = step_programs(
            run.config,
            run.arch,
            Meshes(run.learner.mesh, run.sampler.mesh),
            lengths=all_longest(run.config.data),
            memory=memory_limit() or 0.0,
        )
        updates = [
            compile_program(one, run.learner.mesh, run.config.trainer.compilation_cache_dir)
            for one in step.programs
            if one.stage == "update"
        ]
    return max(updates, key=lambda one: one.total)


def memory_limit() -> float | None:
    """Bytes that JAX may take on its first device; None if it does not say."""
    return _memory_stats().get("bytes_limit")


def peak_bytes() -> float | None:
    """The most bytes that JAX has held on a device of this process; None if it does not say."""
    import jax

    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return None if None in peaks else max(peak for peak in peaks if peak is not None)


def peak_gib() -> float | None:
    peak = peak_bytes()
    return None if peak is None else peak / GIB


def _memory_stats() -> dict[str, float]:
    import jax

    return jax.local_devices()[0].memory_stats() or {}


def gib(size: float | None) -> str:
    return "unknown size" if size is None else f"{size / GIB:.1f} GiB"
