"""Host: the sections of the accelerator report that check whether it computes correctly: attention, and tokens.

The reference of the attention kernels is XLA's attention in float32 on the same device. The reference of tokens and
log-probabilities is the same policy on the CPU.
"""

import argparse
import dataclasses
import functools
import math
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from accelerator_findings import Findings
from benchmark_update import open_random_run
from contenders import seconds_of
from workload import make_prompts, rows_of_responses

LOGPROB_TOLERANCE = 1e-3  # nats, in float32
K3_LIMITS = {"float32": 1e-6, "bfloat16": 1e-3}  # nats, training pass against sampler: docs/troubleshooting.md
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.03}  # of attention: absolute, and relative to the value


def attention(findings: Findings, folder: Path, *, small: bool) -> None:
    """The fused kernels and XLA's attention against attention in float32: values and gradients."""
    import jax

    from dapo_jax.models import splash, tree_attention
    from dapo_jax.models.fused_attention import IMPLEMENTATIONS, PLATFORMS, bin_attention, on_each_device

    device = jax.devices()[0]
    shape = (4, 128, 4, 2) if small else (8, 2048, 8, 2)
    kernels = [bin_attention(name, device) for name, platform in PLATFORMS.items() if platform == device.platform]
    interpreted = {"splash": splash.attend, "triton": tree_attention.attend} if device.platform == "cpu" else {}
    for name, attend in interpreted.items():
        attend = on_each_device(functools.partial(attend, interpret=True))
        kernels.append(dataclasses.replace(IMPLEMENTATIONS[name], attend=attend))
    rows, length, heads, kv_heads = shape
    findings.note(
        f"{rows} bins of {length} slots, {heads} query heads and {kv_heads} key-value heads. Each error is the largest "
        "|x - y| / (1 + |y|) on real tokens; y is XLA's attention in float32, in the same bins. Milliseconds are those "
        "of the values and gradients together, the median of three."
        + (" On a CPU, the kernels run in Pallas' interpreter." if interpreted else "")
    )
    for kernel in kernels:
        compare_kernel(findings, kernel, None if interpreted else device, shape)


def compare_kernel(findings: Findings, kernel: Any, device: Any, shape: tuple[int, int, int, int]) -> None:
    """Errors of a kernel and of XLA's attention, in bins as the kernel takes them.

    Args:
        kernel: a BinAttention.
        device: None if the kernel is interpreted.
        shape: bins, slots, query heads, key-value heads.
    """
    import jax.numpy as jnp

    from dapo_jax.models.attention import XLA
    from dapo_jax.models.fused_attention import unfit

    bins = make_bins(*shape[:2], packs=kernel.packs, shares=kernel.shared_width > 0)
    for head_size in (64, 128):
        for dtype in ("float32", "bfloat16"):
            problem = "" if device is None else unfit(kernel.name, device, jnp.dtype(dtype), head_size)
            if problem:
                findings.note(f"No {kernel.name} for heads of {head_size} in {dtype}: it {problem}.")
            for one in [XLA] if problem else [XLA, kernel]:
                errors, milliseconds = compare_attention(one, bins, (*shape, head_size), dtype, padding=one is kernel)
                name = one.name if one is kernel else f"{one.name}, bins of {kernel.name}"
                findings.row(
                    "Errors", attention=name, dtype=dtype, **{"head size": head_size}, **errors, ms=milliseconds
                )
                if one is kernel:
                    worst, limit = max(errors.values()), TOLERANCES[dtype]
                    findings.check(
                        f"{one.name}, {dtype}, heads of {head_size}: error of values and gradients",
                        worst,
                        f"at most {limit:g}",
                        worst <= limit,
                    )


def make_bins(rows: int, length: int, *, packs: bool, shares: bool) -> Any:
    """Bins [rows, length] in which trees of different sizes follow each other, with padding; the second is empty."""
    from dapo_jax.data.containers import Bins

    trees, branches = np.zeros((2, rows, length), np.int32)
    for row in range(rows):
        if row == 1:
            continue
        slot = branch = 0
        left = length * (rows - row) // rows  # the rest is padding
        for tree in range(1, 4 if packs else 2):
            size = left // 3 if packs else left
            responses = [size // 5] * (3 if shares else 1)
            prompt = size - sum(responses)
            trees[row, slot : slot + size] = tree
            slot += prompt
            for response in responses:
                branch += 1
                branches[row, slot : slot + response] = branch
                slot += response
    return Bins(tokens=trees, positions=trees, trees=trees, branches=branches)


def compare_attention(
    attention: Any, bins: Any, shape: tuple[int, ...], dtype: str, *, padding: bool
) -> tuple[dict[str, float], float]:
    """Errors of the values and of each gradient, and milliseconds.

    Args:
        attention: a BinAttention.
        padding: the gradients that come in are not zero on padding, and must not matter there.
    """
    import jax
    import jax.numpy as jnp

    from dapo_jax.models.attention import XLA

    rows, length, heads, kv_heads, size = shape
    rng = np.random.default_rng(0)
    drawn = [
        jnp.asarray(rng.normal(size=(rows, length, count, size)), jnp.float32)
        for count in (heads, kv_heads, kv_heads, heads)
    ]
    operands, cotangent = [x.astype(dtype) for x in drawn[:3]], drawn[3]
    real = bins.trees > 0
    masked = cotangent * real[:, :, None, None]

    @functools.partial(jax.jit, static_argnums=0)
    def values_and_gradients(one: Any, operands: Any, cotangent: Any, bins: Any) -> Any:
        values, pull_back = jax.vjp(one.attend(bins), *operands)
        return values, *pull_back(cotangent)

    def run() -> Any:
        return jax.block_until_ready(values_and_gradients(attention, operands, given, prepared))

    given, prepared = cotangent if padding else masked, attention.prepare(bins)
    found = run()
    seconds = [seconds_of(run) for _ in range(3)]
    expected = values_and_gradients(XLA, [x.astype(jnp.float32) for x in operands], masked, bins)
    errors = {}
    for name, x, y in zip(("values", "d query", "d key", "d value"), found, expected, strict=True):
        x, y = np.asarray(x.astype(jnp.float32))[real], np.asarray(y)[real]
        worst = float(np.max(np.abs(x - y) / (1 + np.abs(y))))
        errors[name] = worst if math.isfinite(worst) else math.inf
    return errors, 1000 * statistics.median(seconds)


def tokens(findings: Findings, folder: Path, *, small: bool) -> None:
    """The same weights on this device and on the CPU: greedy tokens, and log-probabilities of sampler and trainer."""
    script = Path(__file__).with_name("accelerator_sections.py")
    command = [sys.executable, script, "tokens_on_cpu", "--folder", str(folder), *(["--small"] if small else [])]
    subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"})
    with np.load(folder / "tokens_on_cpu.npz", allow_pickle=False) as arrays:
        of_cpu = dict(arrays)
    given = of_cpu["float32 tokens"]
    findings.note(
        f"A random model with the same weights samples {given.size} tokens greedily here and on the CPU. The sampler's "
        "log-probabilities are compared up to and with a row's first token that differs: there the two tokens must be "
        "equally likely, a tie that rounding decides. Those of the training pass are compared on the CPU's float32 "
        "tokens; k3 is the mean of exp(d) - 1 - d over the differences d."
    )
    for dtype in ("float32", "bfloat16"):
        here = policy_outputs(dtype, given, small=small)
        there = {name.removeprefix(f"{dtype} "): x for name, x in of_cpu.items() if name.startswith(dtype)}
        same = here["tokens"] == there["tokens"]
        before = np.pad(same[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        compared = np.logical_and.accumulate(before, axis=1)
        share, sampled = float(np.mean(same)), (here["sampled"] - there["sampled"])[compared]
        trained, own = here["trained"] - there["trained"], here["of own"] - here["sampled"]
        for name, difference in {
            "sampler, here and CPU": sampled,
            "training pass, here and CPU": trained,
            "training pass and sampler, here": own,
        }.items():
            findings.row(
                "Differences of log-probabilities, nats",
                dtype=dtype,
                between=name,
                mean=float(np.mean(np.abs(difference))),
                most=float(np.max(np.abs(difference), initial=0.0)),
                k3=k3(difference),
            )
        findings.row("Greedy tokens", dtype=dtype, tokens=same.size, **{"share equal": share})
        if dtype == "float32":
            apart = np.abs(here["sampled"] - there["sampled"])[compared & ~same]
            findings.check(
                "float32: greedy tokens that differ from the CPU's without a tie",
                int(np.sum(apart > LOGPROB_TOLERANCE)),
                "0",
                bool(np.all(apart <= LOGPROB_TOLERANCE)),
            )
            for name, difference in {"sampler": sampled, "training pass": trained}.items():
                worst = float(np.max(np.abs(difference), initial=0.0))
                findings.check(
                    f"float32: log-probabilities of the {name}, largest difference to the CPU's",
                    worst,
                    f"at most {LOGPROB_TOLERANCE:g} nats",
                    worst <= LOGPROB_TOLERANCE,
                )
        limit = K3_LIMITS[dtype]
        findings.check(
            f"{dtype}: k3 of the training pass and the sampler", k3(own), f"below {limit:g} nats", k3(own) < limit
        )


def k3(difference: np.ndarray) -> float:
    """The estimate of the KL divergence from log-probability differences."""
    difference = difference.astype(np.float64)
    return float(np.mean(np.expm1(difference) - difference))


def tokens_on_cpu(findings: Findings, folder: Path, *, small: bool) -> None:
    """What `tokens` compares with."""
    arrays: dict[str, np.ndarray] = {}
    given = None
    for dtype in ("float32", "bfloat16"):
        outputs = policy_outputs(dtype, given, small=small)
        given = outputs["tokens"] if given is None else given
        arrays |= {f"{dtype} {name}": array for name, array in outputs.items()}
    np.savez(folder / "tokens_on_cpu.npz", allow_pickle=False, **arrays)


def policy_outputs(dtype: str, given: np.ndarray | None, *, small: bool) -> dict[str, np.ndarray]:
    """What a policy with known weights does on this process's devices.

    Args:
        given: [B, R] tokens; None: those that it samples.

    Returns:
        [B, R] arrays: greedy `tokens`; log-probabilities `sampled` of them by the sampler, `of own` of them and
        `trained` of the given tokens by the training pass.
    """
    from dapo_jax.learner.batch import policy_statistics
    from dapo_jax.rollout.sampling import EVALUATE, Sampling

    rows, prompt, length = (8, 4, 12) if small else (64, 24, 128)
    args = argparse.Namespace(
        shape="report-narrow" if small else "report-wide",
        batch=rows,
        group=1,
        prompt_length=prompt,
        lengths=str(length),
        micro=rows,
    )
    prompts = make_prompts(args)
    options = {
        "rollout.decode_chunk_length": length // 4,
        "reward.num_workers": 1,
    }
    with ExitStack() as stack:
        run = open_random_run(stack, args, dtype, options)
        params = known_params(run)
        weights, greedy = run.learner.networks.decode_weights(params), Sampling.create(0.0, 1.0, -1)
        request = run.sampler.request(weights, 1, EVALUATE, greedy)
        rollout = run.sampler.engine.generate(prompts, range(rows), request)
        sampled = np.asarray(rollout.responses)

        def trained(responses: np.ndarray) -> np.ndarray:
            groups = responses[:, None]  # of one response each
            batch = rows_of_responses(run, prompts, groups, np.ones(groups.shape, bool), np.zeros(groups.shape))
            return policy_statistics(run.learner, params, batch).logprobs

        of_own = trained(sampled)
        return {
            "tokens": sampled,
            "sampled": np.asarray(rollout.logprobs),
            "of own": of_own,
            "trained": of_own if given is None else trained(given),
        }


def known_params(run: Any) -> Any:
    """Random float32 parameters for `run`, the same bits on every platform."""
    import jax

    from dapo_jax.models.weights import unflatten, weight_shardings, weight_table
    from dapo_jax.parallel.sharding import TRAIN_RULES

    rng, table = np.random.default_rng(11), weight_table(run.arch)
    drawn = ((weight, rng.normal(float(weight.initializer == "ones"), 0.1, weight.shape)) for weight in table)
    params = unflatten((weight, leaf.astype(np.float32)) for weight, leaf in drawn)
    return jax.device_put(params, weight_shardings(table, run.learner.mesh, TRAIN_RULES))
