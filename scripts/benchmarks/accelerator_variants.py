"""Host: the section of the accelerator report that undoes choices of sampling and of the update."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import benchmark_rollout
import benchmark_update
from accelerator_benchmarks import DTYPE, REPEATS, SIZES, STAND_INS, gib, measured, memory_limit, update_case
from accelerator_findings import Findings
from accelerator_rollouts import rollout_case


@contextlib.contextmanager
def layers_write(*, narrow: bool) -> Iterator[None]:
    """Layers write their products in the dtype of their matrices, as on GPUs, or in float32."""
    import jax

    from dapo_jax.models import layers, lora

    jax.clear_caches()  # how products are written is not part of their keys
    with contextlib.ExitStack() as stack:
        for module in (layers, lora):
            stack.enter_context(mock.patch.object(module, "writes_narrow", lambda: narrow))
        yield
    jax.clear_caches()


@contextlib.contextmanager
def no_kernels() -> Iterator[None]:
    """Attention to pages copies them, as where no kernel fits, and logits are written; a CPU has no pages."""
    from dapo_jax.models.paged_attention import attend_gathered
    from dapo_jax.run import sampler

    chosen = sampler.page_attention
    with mock.patch.object(sampler, "page_attention", lambda settings: (chosen(settings)[0] and attend_gathered, "")):
        yield


def variants(findings: Findings, folder: Path, *, small: bool) -> None:
    """Sampling and the update of 0.5B with choices undone, beside what dapo_jax does on a GPU."""
    shape = (STAND_INS if small else SIZES)["0.5b"]
    sampled, updated = rollout_case(shape, small=small), update_case(shape, small=small)
    if sampled is None and updated is None:
        findings.keep(skipped=f"{shape} does not fit {gib(memory_limit())}")
        return
    findings.note(
        f"{shape}, random weights, {DTYPE}, the rows and lengths of the sections Rollout and Update. Seconds are the "
        f"median of {REPEATS} after a first call. A CPU has nothing to undo in sampling: its rows are alike."
    )

    def row(part: str, variant: str, make: Callable[[], Any], case: str = "") -> None:
        first, seconds, tokens = measured(make(), case)
        speed = {"first call, s": first, "seconds": seconds, "tokens/s": tokens / seconds}
        findings.row("Variants", part=part, variant=variant, **speed)

    if sampled is not None:
        for variant, undone in {
            "as it is": nullcontext(),
            "no kernels: pages copied, logits written": no_kernels(),
            "products written in float32": layers_write(narrow=False),
        }.items():
            with undone:
                row("sampling", variant, lambda: benchmark_rollout.Ours(sampled[0], DTYPE), sampled[1])
    if updated is not None:
        args, options = updated
        for variant, policy, undone in (
            ("attention kept (model.remat_policy=attention)", "attention", nullcontext()),
            ("and products written in float32", "attention", layers_write(narrow=False)),
            ("nothing kept (model.remat_policy=full)", "full", nullcontext()),
        ):
            with undone:
                given = options | {"model.remat_policy": policy}
                row("update", variant, lambda given=given: benchmark_update.Ours(args, DTYPE, given))
