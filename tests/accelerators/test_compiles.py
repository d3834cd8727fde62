"""Every program compiles for NVIDIA GPUs and TPUs that are not here. Run by scripts/test_accelerators.sh."""

import functools
import os
import re

import jax
import pytest
from accelerators.cases import CASES, DECODE, H100, UPDATE, V5E, Case, config_of
from accelerators.programs import parts_of, slots_and_pages, step, wide_types
from compiler_effort import effort

from dapo_jax.parallel.ahead_of_time import compile_ahead

KEPT = os.environ["DAPO_JAX_ACCELERATORS"]


def compiled(case, topology, directory):
    """Each compiled program of a case by its name. The test fails where one does not compile."""
    parts, found = parts_of(config_of(case, directory), topology, devices=case.devices), {}
    device = parts.mesh.devices.flat[0]
    kernels = directory.parent / f"kernels of {device.device_kind}"  # and of this worker
    programs = list(case.programs(parts))  # outside of the mesh, on whose devices nothing can be computed
    with jax.set_mesh(parts.mesh):
        for name, lower in programs:
            try:
                lowered = lower()
                assert not wide_types(lowered.as_text()), "it computes in 64 bits"
                shared = None if device.platform == "tpu" else kernels
                found[name] = compile_ahead(lowered, parts.mesh, directory=KEPT, kernels=shared)
            except Exception as error:
                pytest.fail(f"{case.name}: {name} does not compile for {topology}: {error}")
    return found


def in_turn():
    """Each case with each platform; one of them belongs to the short form, in turn, unless the case wants all or none.

    What the short form compiles for a TPU in turn, the long form compiles once more with the usual effort.
    """
    for index, case in enumerate(CASES):
        for number, topology in enumerate(case.platforms):
            short = case.both or (number == index % min(len(case.platforms), 2) and not case.combined)
            name = f"{topology} {case.name}"
            if short and not case.both and topology == V5E:
                yield pytest.param(case, topology, -1.0, id=f"{name}, little effort")
                short = False
            yield pytest.param(case, topology, 0.0, id=name, marks=() if short else pytest.mark.slow)


@pytest.mark.parametrize(("case", "topology", "value"), in_turn())
def test_every_program_compiles(case, topology, value, tmp_path):
    with effort(value):
        compiled(case, topology, tmp_path)


LIKE_OTHERS = "rtx4090:1", "h200:2", "b200:2"  # GPUs that differ little from those of the short form
KERNELS = {  # names of the attention's forward and backward pass in a compiled program
    "cudnn": (r'"__cudnn\$fmhaSoftmax"', r'"__cudnn\$fmhaSoftmaxBackward"'),
    "triton": (r"custom-call\(.*tree_attention_fwd", r"custom-call\(.*tree_attention_dkv"),
    "splash": (r"%splash_mha_fwd[\w.]* = ", r"%splash_mha_dkv[\w.]* = "),
}


@pytest.mark.parametrize(("topology", "kernel"), [(H100, "cudnn"), (H100, "triton"), (V5E, "splash")])
@pytest.mark.parametrize(("policy", "passes"), [("full", 2), ("attention", 1)])
def test_remat_attention_keeps_what_the_kernel_gives(topology, kernel, policy, passes, tmp_path):
    changes = {"model.remat_policy": policy, "model.attention": kernel}
    (program,) = compiled(Case(policy, UPDATE, changes), topology, tmp_path).values()
    forward, backward = (len(re.findall(pattern, program.text)) for pattern in KERNELS[kernel])
    assert forward == passes * backward
    assert backward == (2 if topology == H100 else 1)  # two layers in a turn: the compiler's options arrived


@pytest.mark.parametrize("topology", ["l4:1", "b200:2"])
def test_cudnn_compiles_for_other_gpus(topology, tmp_path):
    changes = {"model.attention": "cudnn", "mesh.data": 1, "mesh.fsdp": 1 if topology == "l4:1" else 2}
    changes |= {"mesh.tensor": 1, "mesh.train_tensor": 1}
    (program,) = compiled(Case("an update", UPDATE, changes), topology, tmp_path).values()
    assert re.search(KERNELS["cudnn"][1], program.text)


@pytest.mark.parametrize(
    "topology", ["t4:1", "l4:1", "a100:2x2", *(pytest.param(x, marks=pytest.mark.slow) for x in LIKE_OTHERS)]
)
def test_a_step_compiles_for_other_gpus(topology, tmp_path):
    """Those without bfloat16, with less shared memory, newer ones, and several hosts."""
    hosts, _, devices = topology.partition(":")[2].rpartition("x")
    changes = {"mesh.data": 1, "mesh.fsdp": int(hosts or 1) * int(devices), "mesh.tensor": 1, "mesh.train_tensor": 1}
    programs = compiled(Case("a step", step("prefill", DECODE, "actor"), changes), topology, tmp_path)
    fused = any("tree_attention_dkv" in program.text for program in programs.values())
    assert fused == (not topology.startswith("t4"))


@pytest.mark.parametrize("topology", [H100, V5E])
def test_pages_are_never_copied(topology, tmp_path):
    """So a program needs as many bytes more for more pages as these have themselves."""
    fewer, more = (
        compiled(Case("slots", functools.partial(slots_and_pages, pages=pages)), topology, tmp_path)
        for pages in (4096, 8192)
    )
    parts = parts_of(config_of(Case("slots", slots_and_pages), tmp_path), topology)
    heads = parts.arch.num_kv_heads // parts.mesh.shape["tensor"]
    tokens = 4096 * parts.config.rollout.decode_chunk_length
    of_pages = parts.arch.num_layers * tokens * heads * 2 * parts.arch.head_dim * 2  # bfloat16
    for name, program in more.items():
        assert program.bytes - fewer[name].bytes == pytest.approx(of_pages, rel=0.02), name
