"""Every program compiles for NVIDIA GPUs and TPUs that are not here. Run by scripts/test_accelerators.sh."""

import os
import re

import jax
import pytest
from accelerators.cases import CASES, DECODE, H100, UPDATE, V5E, Case, config_of
from accelerators.programs import parts_of, step, wide_types

from dapo_jax.parallel.ahead_of_time import compile_ahead

KEPT = os.environ["DAPO_JAX_ACCELERATORS"]


def compiled(case, topology, directory):
    """The optimised text of each program of a case by its name. The test fails where one does not compile."""
    parts, texts = parts_of(config_of(case, directory), topology, devices=case.devices), {}
    programs = list(case.programs(parts))  # outside of the mesh, on whose devices nothing can be computed
    with jax.set_mesh(parts.mesh):
        for name, lower in programs:
            try:
                lowered = lower()
                assert not wide_types(lowered.as_text()), "it computes in 64 bits"
                texts[name] = compile_ahead(lowered, parts.mesh, directory=KEPT).text
            except Exception as error:
                pytest.fail(f"{case.name}: {name} does not compile for {topology}: {error}")
    return texts


@pytest.mark.parametrize(
    ("case", "topology"),
    [pytest.param(case, topology, id=f"{topology} {case.name}") for case in CASES for topology in case.platforms],
)
def test_every_program_compiles(case, topology, tmp_path):
    compiled(case, topology, tmp_path)


KERNELS = {  # names of the attention's forward and backward pass in a compiled program
    "cudnn": (r'"__cudnn\$fmhaSoftmax"', r'"__cudnn\$fmhaSoftmaxBackward"'),
    "triton": (r"custom-call\(.*tree_attention_fwd", r"custom-call\(.*tree_attention_dkv"),
    "splash": (r"%splash_mha_fwd[\w.]* = ", r"%splash_mha_dkv[\w.]* = "),
}


@pytest.mark.parametrize(("topology", "kernel"), [(H100, "cudnn"), (H100, "triton"), (V5E, "splash")])
@pytest.mark.parametrize(("policy", "passes"), [("full", 2), ("attention", 1)])
def test_remat_attention_keeps_what_the_kernel_gives(topology, kernel, policy, passes, tmp_path):
    changes = {"model.remat_policy": policy, "model.attention": kernel}
    (text,) = compiled(Case(policy, UPDATE, changes), topology, tmp_path).values()
    forward, backward = (len(re.findall(pattern, text)) for pattern in KERNELS[kernel])
    assert forward == passes * backward
    assert backward == (2 if topology == H100 else 1)  # two layers in a turn: the compiler's options arrived


@pytest.mark.parametrize("topology", ["l4:1", "b200:2"])
def test_cudnn_compiles_for_other_gpus(topology, tmp_path):
    changes = {"model.attention": "cudnn", "mesh.data": 1, "mesh.fsdp": 1 if topology == "l4:1" else 2}
    changes |= {"mesh.tensor": 1, "mesh.train_tensor": 1}
    (text,) = compiled(Case("an update", UPDATE, changes), topology, tmp_path).values()
    assert re.search(KERNELS["cudnn"][1], text)


@pytest.mark.parametrize("topology", ["t4:1", "l4:1", "rtx4090:1", "a100:2x2", "h200:2", "b200:2"])
def test_a_step_compiles_for_other_gpus(topology, tmp_path):
    """Those without bfloat16, with less shared memory, newer ones, and several hosts."""
    hosts, _, devices = topology.partition(":")[2].rpartition("x")
    changes = {"mesh.data": 1, "mesh.fsdp": int(hosts or 1) * int(devices), "mesh.tensor": 1, "mesh.train_tensor": 1}
    texts = compiled(Case("a step", step("prefill", DECODE, "actor"), changes), topology, tmp_path)
    fused = any("tree_attention_dkv" in text for text in texts.values())
    assert fused == (not topology.startswith("t4"))
