"""Host: the sections of the accelerator report that measure sampling: to full length, and with fewer slots.

They measure like benchmark_rollout.py, with random weights in bfloat16, on all devices.
"""

import argparse
from pathlib import Path
from typing import Any

import benchmark_rollout
from accelerator_benchmarks import (
    DTYPE,
    GROUP,
    REPEATS,
    SIZES,
    STAND_INS,
    architecture,
    gib,
    measured,
    memory_limit,
    peak_gib,
)
from accelerator_findings import Findings
from accelerator_shares import show_shares
from contenders import device_limits
from workload import response_lengths


def rollout(findings: Findings, folder: Path, *, small: bool, size: str, most: int = 256) -> None:
    """Sampling all rows to their full length: tokens per second, and the share of what reading memory allows.

    `most`: rows of a device, if they fit.
    """
    import jax

    from dapo_jax.models.weights import count_params

    shape, devices = (STAND_INS if small else SIZES)[size], jax.device_count()
    found = rollout_case(shape, small=small, most=most)
    if found is None:
        findings.keep(skipped=f"{shape} does not fit {gib(memory_limit())}")
        return
    args, case = found
    arch, length, ours = architecture(shape), int(case), benchmark_rollout.Ours(args, DTYPE)
    first, seconds, sampled = measured(ours, case)
    least = reading_seconds(arch, args, length, devices)
    rows = f"{args.batch} rows in groups of {GROUP}, prompts of {args.prompt_length} and responses of {length} tokens"
    findings.note(
        f"{shape}, random weights, {DTYPE}: {rows}, all rows to the end. Seconds are those of prefill and decoding, "
        f"the median of {REPEATS} after a first call. The limit is reading the weights and the filled cache once per "
        "decoding step at the bandwidth of the data sheet; a group's prompt is read once."
    )
    findings.row(
        "Rollout",
        devices=devices,
        parameters=count_params(arch),
        **{"first call, s": first},
        seconds=seconds,
        **{
            "tokens/s": sampled / seconds,
            "ms per decoding step": 1000 * seconds / length,
            "limit, tokens/s": sampled / least if least is not None else None,
            "share of the limit": least / seconds if least is not None else None,
            "peak GiB": peak_gib(),
        },
    )
    findings.check(f"{shape}: sampled tokens", sampled, str(args.batch * length), sampled == args.batch * length)
    show_shares(findings, lambda: ours(case), "rollout")


def rollout_case(shape: str, *, small: bool, most: int = 256) -> tuple[argparse.Namespace, str] | None:
    """What a rollout is measured on, and the length of all responses; None if no rows fit.

    Args:
        most: rows of a device.
    """
    import jax

    prompt, length = (8, 16) if small else (512, 512)
    per_device = rows_that_fit(architecture(shape), prompt, length, most=16 if small else most)
    batch = per_device * jax.device_count()
    args = argparse.Namespace(shape=shape, batch=batch, group=GROUP, prompt_length=prompt, chunk=0)
    return (args, str(length)) if per_device else None


def long_tail(findings: Findings, folder: Path, *, small: bool) -> None:
    """Slots for all rows and for half of them, with responses of equal and of many lengths."""
    import jax

    shape, devices = (STAND_INS if small else SIZES)["0.5b"], jax.device_count()
    prompt, longest = (8, 24) if small else (512, 512)
    per_device = rows_that_fit(architecture(shape), prompt, longest, most=16 if small else 256)
    if not per_device:
        findings.keep(skipped=f"{shape} does not fit {gib(memory_limit())}")
        return
    args = argparse.Namespace(shape=shape, batch=per_device * devices, group=GROUP, prompt_length=prompt, chunk=0)
    cases = {"equal": str(longest), "long tail": f"lognormal:median={longest // 4},sigma=0.8,clip={longest}"}
    mean = response_lengths(cases["long tail"], args).mean()
    findings.note(
        f"{shape}, random weights, {DTYPE}: {args.batch} rows in groups of {GROUP}, prompts of {prompt} tokens and "
        f"responses of {longest} tokens, or of {mean:.0f} on average and {longest} at most ({cases['long tail']}). The "
        f"rows that are not in a slot wait for one. Seconds are the median of {REPEATS} after a first call."
    )
    for parts in (1, 2):
        slots = args.batch // parts
        ours = benchmark_rollout.Ours(args, DTYPE, slots)
        for lengths, case in cases.items():
            first, seconds, sampled = measured(ours, case)
            speed = {"first call, s": first, "seconds": seconds, "tokens/s": sampled / seconds}
            findings.row("Slots", slots=slots, lengths=lengths, **speed)
            wanted = int(response_lengths(case, args).sum())
            findings.check(f"{slots} slots, {lengths}: sampled tokens", sampled, str(wanted), sampled == wanted)


def rows_that_fit(arch: Any, prompt: int, length: int, *, most: int) -> int:
    """Rows per device for the rollout: `most`, or the next power of two below whose weights and caches fit; 0: none."""
    from dapo_jax.models.weights import count_params

    limit, params = memory_limit(), count_params(arch)
    rows = most
    while limit is not None and rows >= GROUP:
        cache = rows * (prompt / GROUP + length) * cache_bytes(arch)
        if max(6 * params, 2 * params + 2 * cache) <= 0.9 * limit:  # float32 at the start; a slot has room for a prompt
            break
        rows //= 2
    return rows if rows >= GROUP else 0


def cache_bytes(arch: Any) -> int:
    """Bytes of the keys and values of a token, in 16 bits."""
    return 2 * 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim


def reading_seconds(arch: Any, args: argparse.Namespace, length: int, devices: int) -> float | None:
    """Seconds of reading weights and cache in all decoding steps; None where the bandwidth is not known."""
    from dapo_jax.models.weights import count_params

    bandwidth = device_limits().bandwidth
    if bandwidth is None:
        return None
    prompts = args.batch / GROUP * args.prompt_length * cache_bytes(arch) * (length - 1)
    own = args.batch * cache_bytes(arch) * (length - 1) * length / 2
    return (2 * count_params(arch) * (length - 1) + (prompts + own) / devices) / bandwidth
