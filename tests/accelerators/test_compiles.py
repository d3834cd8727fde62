"""Every program compiles for NVIDIA GPUs and TPUs that are not here. Run by scripts/test_accelerators.sh."""

import functools
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from accelerators.cases import CASES, DECODE, H100, UPDATE, V5E, Case, config_of
from accelerators.programs import decoding, engine, engine_calls, parts_of, returning, step, wide_types
from jax.sharding import NamedSharding, PartitionSpec
from scatters import unordered

from dapo_jax.models.architecture import Delta
from dapo_jax.models.gated_delta import Inputs, empty_state, next_token, update_states
from dapo_jax.models.state_kernels import state_kernel, update_on_gpu, update_on_tpu
from dapo_jax.parallel.compilation import compile_ahead, program_key
from dapo_jax.parallel.devices import devices_of
from dapo_jax.parallel.mesh import BATCH_AXES, make_mesh
from dapo_jax.parallel.sharding import on_mesh
from dapo_jax.preflight.hlo_costs import program_costs
from dapo_jax.preflight.hlo_products import PagedKeys

KEPT = os.environ["DAPO_JAX_ACCELERATORS"]
DISTINCT = "teacher's most likely tokens"  # the case whose loss gathers several logits of a token: no two are the same


@pytest.fixture
def compiled(unchanged, tmp_path):
    """A function that gives the compiled programs of cases by their names, a dict for each case.

    The test fails where one does not compile. It is skipped if it has passed with the same programs and compilers.
    """

    def of(topology, *cases):
        lowered = [_lowered(case, topology, tmp_path) for case in cases]
        unchanged(program_key(program, mesh) for programs, mesh in lowered for program in programs.values())
        return [_compiled(case, topology, *found) for case, found in zip(cases, lowered, strict=True)]

    def _compiled(case, topology, programs, mesh):
        device, found = mesh.devices.flat[0], {}
        kernels = tmp_path.parent / f"kernels of {device.device_kind}"  # and of this worker
        for name, program in programs.items():
            try:
                shared = None if device.platform == "tpu" else kernels
                with jax.set_mesh(mesh):
                    found[name] = compile_ahead(program, mesh, directory=KEPT, kernels=shared)
            except Exception as error:
                pytest.fail(f"{case.name}: {name} does not compile for {topology}: {error}")
        return found

    return of


def _lowered(case: Case, topology: str, directory: Path):
    """The programs of a case, lowered for a topology, and its mesh."""
    parts, found = parts_of(config_of(case, directory), topology, devices=case.devices), {}
    programs = list(case.programs(parts))  # outside of the mesh, on whose devices nothing can be computed
    with jax.set_mesh(parts.mesh):
        for name, lower in programs:
            try:
                found[name] = lower()
            except Exception as error:
                pytest.fail(f"{case.name}: {name} cannot be lowered for {topology}: {error}")
            text = found[name].as_text()
            assert not wide_types(text), f"{case.name}: {name} computes in 64 bits"
            if parts.mesh.devices.flat[0].platform != "tpu" and case.name != DISTINCT:  # a TPU's scatters have an order
                assert not unordered(text), f"{case.name}: {name} has atomics: {unordered(text)}"
    return found, parts.mesh


def in_turn():
    """Each case with each platform; CI asks one of them, in turn, unless the case wants all or none."""
    for index, case in enumerate(CASES):
        for number, topology in enumerate(case.platforms):
            short = case.both or (number == index % min(len(case.platforms), 2) and not case.combined)
            yield pytest.param(case, topology, id=f"{topology} {case.name}", marks=() if short else pytest.mark.full)


@pytest.mark.parametrize(("case", "topology"), in_turn())
def test_every_program_compiles(case, topology, compiled):
    compiled(topology, case)


LIKE_OTHERS = "rtx4090:1", "h200:2", "b200:2"  # GPUs that differ little from those that CI asks
KERNELS = {  # names of the attention's forward and backward pass in a compiled program
    "cudnn": (r'"__cudnn\$fmhaSoftmax"', r'"__cudnn\$fmhaSoftmaxBackward"'),
    "triton": (r"custom-call\(.*tree_attention_fwd", r"custom-call\(.*tree_attention_dkv"),
    "splash": (r"%splash_mha_fwd[\w.]* = ", r"%splash_mha_dkv[\w.]* = "),
}


@pytest.mark.parametrize(("topology", "kernel"), [(H100, "cudnn"), (H100, "triton"), (V5E, "splash")])
@pytest.mark.parametrize(("policy", "passes"), [("full", 2), ("attention", 1)])
def test_remat_attention_keeps_what_the_kernel_gives(topology, kernel, policy, passes, compiled):
    changes = {"model.remat_policy": policy, "model.attention": kernel}
    [programs] = compiled(topology, Case(policy, UPDATE, changes))
    (program,) = programs.values()
    forward, backward = (len(re.findall(pattern, program.text)) for pattern in KERNELS[kernel])
    assert forward == passes * backward
    assert backward == (2 if topology == H100 else 1)  # two layers in a turn: the compiler's options arrived


@pytest.mark.parametrize("topology", ["l4:1", "b200:2"])
def test_cudnn_compiles_for_other_gpus(topology, compiled):
    changes = {"model.attention": "cudnn", "mesh.data": 1, "mesh.fsdp": 1 if topology == "l4:1" else 2}
    changes |= {"mesh.tensor": 1, "mesh.train_tensor": 1}
    [programs] = compiled(topology, Case("an update", UPDATE, changes))
    (program,) = programs.values()
    assert re.search(KERNELS["cudnn"][1], program.text)


@pytest.mark.parametrize(
    "topology", ["t4:1", "l4:1", "a100:2x2", *(pytest.param(x, marks=pytest.mark.full) for x in LIKE_OTHERS)]
)
def test_a_step_compiles_for_other_gpus(topology, compiled):
    """Those without bfloat16, with less shared memory, newer ones, and several hosts."""
    hosts, _, devices = topology.partition(":")[2].rpartition("x")
    changes = {"mesh.data": 1, "mesh.fsdp": int(hosts or 1) * int(devices), "mesh.tensor": 1, "mesh.train_tensor": 1}
    [programs] = compiled(topology, Case("a step", step("prefill", DECODE, "actor"), changes))
    fused = any("tree_attention_dkv" in program.text for program in programs.values())
    assert fused == (not topology.startswith("t4"))


@pytest.mark.parametrize(("size", "bytes_", "flops"), [("0.5b", 245e9, 63e12), ("1.5b", 480e9, 192e12)])
def test_bytes_and_products_of_an_update(size, bytes_, flops, compiled):
    """16,384 tokens, of which 12,288 are predicted, on one H100, by JAX 0.10.2: what takes the time, counted."""
    alone = dict.fromkeys(("mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.train_tensor"), 1)
    lengths = {"data.max_prompt_length": 512, "data.max_response_length": 1536, "rollout.n": 8}
    rows = {"data.train_batch_size": 4, "actor.ppo_mini_batch_size": 4, "actor.ppo_micro_batch_size_per_device": 8}
    kept = {"actor.share_prompts": False, "model.remat_policy": "attention"}
    [programs] = compiled("h100:1", Case(size, UPDATE, alone | lengths | rows | kept, family=f"qwen2.5-{size}"))
    (program,) = programs.values()
    costs = program_costs(program.text, [0], pairs=19165184)
    assert costs.bytes <= bytes_ and costs.flops <= flops and not costs.unknown


@pytest.mark.parametrize(
    ("topology", "size", "rows", "needed", "most", "kernels"),
    [
        ("h100:1", "0.5b", 3072, 13.07e9, 1.75, 12),
        ("h100:1", "1.5b", 1536, 17.18e9, 1.6, 12),
        ("h100:1", "0.5b", 256, 1.99e9, 1.95, 13),
        ("v5e:1x1", "0.5b", 768, 3.86e9, 1.4, None),
    ],
)
def test_bytes_and_kernels_of_a_decoded_token(topology, size, rows, needed, most, kernels, compiled):
    """The mean token of responses of 512 tokens to prompts of 512, 8 of each, on one device, by JAX 0.10.2.

    Needed are the weights, the keys and values of each row, and those of each prompt once. No logits are in memory.
    """
    alone = dict.fromkeys(("mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.train_tensor"), 1)
    lengths = {
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "rollout.n": 8,
        "data.train_batch_size": rows // 8,
    }
    changes = alone | lengths | {"rollout.max_num_seqs": rows, "rollout.decode_chunk_length": 32}
    [programs] = compiled(topology, Case(f"{rows} rows", decoding, changes, family=f"qwen2.5-{size}"))
    (program,) = programs.values()
    own, prompts = rows * 240.0, rows * 512.0
    costs = program_costs(program.text, [0], pairs=PagedKeys(own, prompts, prompts / 8))
    layers = {"0.5b": 24, "1.5b": 28}[size]
    assert costs.bytes <= 32 * most * needed and not costs.unknown
    if kernels is not None:
        assert costs.launches <= 32 * (kernels * layers + 28)
        assert f"[{rows},1187,128]" not in program.text


@pytest.mark.parametrize(("topology", "gathers"), [(H100, 7), (V5E, 6)])
def test_the_input_of_matrices_is_gathered_once_in_each_pass(topology, gathers, compiled):
    """Over "tensor": a layer's two forward; backward these, two cotangents, and on GPUs the norms' gradients."""
    mesh, counts = {"mesh.data": 1, "mesh.fsdp": 4, "model.remat_policy": "full"}, []
    deep = [Case(f"{layers} layers", UPDATE, mesh | {"model.random.num_layers": layers}) for layers in (2, 4)]
    for programs in compiled(topology, *deep):
        (program,) = programs.values()
        collectives = program_costs(program.text, [0] * 8).collectives
        counts.append(sum(one.count for one in collectives if (one.kind, one.group) == ("all-gather", 2)))
    assert counts[1] - counts[0] == 2 * gathers


@pytest.mark.parametrize("topology", [H100, V5E])
@pytest.mark.parametrize("programs", [engine, returning])
def test_pages_are_never_copied(programs, topology, compiled, tmp_path):
    """So a program needs as many bytes more for more pages as these have themselves."""
    sizes = (4096, 8192)
    cases = [Case(f"{pages} pages", functools.partial(programs, pages=pages)) for pages in sizes]
    fewer, more = compiled(topology, *cases)
    parts = parts_of(config_of(cases[0], tmp_path), topology)
    heads = parts.arch.num_kv_heads // parts.mesh.shape["tensor"]
    tokens = 4096 * engine_calls(parts).layout.page_length
    of_pages = parts.arch.num_layers * tokens * heads * 2 * parts.arch.head_dim * 2  # bfloat16
    for name, program in more.items():
        assert program.bytes - fewer[name].bytes == pytest.approx(of_pages, rel=0.02), name


@pytest.mark.parametrize(
    ("topology", "kernel", "sizes"),
    [(H100, update_on_gpu, 2.5), (V5E, update_on_tpu, 2.1), (H100, None, 3.6)],
    ids=["h100", "v5e", "h100, without a kernel"],
)
def test_a_token_moves_a_state_of_linear_attention_twice(topology, kernel, sizes):
    """It reads it and writes it: 32 tokens of 512 rows of Qwen3.5-0.8B on a device, at 512 of 1536 places.

    Without a kernel it reads twice.
    """
    delta, devices = Delta(key_heads=16, value_heads=16, key_dim=128, value_dim=128, filter_width=4), 8
    mesh, rows = make_mesh(-1, 1, 1, devices_of(topology, devices)), 512 * devices
    assert kernel in (None, state_kernel(mesh, delta))

    def array(dtype, *shape):
        spec = PartitionSpec(*(BATCH_AXES if size in (rows, 3 * rows) else None for size in shape))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, on_mesh(spec)))

    def tokens(given, held, alive, places):
        update = functools.partial(kernel, places, places) if kernel else update_states

        def token(held, one):
            read, held = next_token(Inputs(one[0], given.filter, *one[1:]), held, alive, delta, update)
            return held, read

        return jax.lax.scan(token, held, (given.channels, given.beta, given.decay))

    shapes = (32, rows, 1, delta.channels), (delta.channels, 4), (32, rows, 1, 16), (32, rows, 1, 16)
    dtypes = jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32
    empty = jax.eval_shape(lambda: empty_state(rows, delta, jnp.bfloat16))
    with jax.set_mesh(mesh):
        given = Inputs(*(array(dtype, *shape) for dtype, shape in zip(dtypes, shapes, strict=True)))
        held = jax.tree.map(lambda x: array(x.dtype, *x.shape), empty)
        if kernel:
            held = held.replace(state=array(jnp.float32, 3 * rows, *empty.state.shape[1:]))
        by_row = array(bool, rows), array(jnp.int32, rows)
        program = jax.jit(tokens, donate_argnums=1).lower(given, held, *by_row).compile()
    costs = program_costs(program.as_text(), [0])
    assert costs.bytes < 32 * sizes * empty.state.size * 4 / devices and not costs.unknown


def test_an_update_compiles_with_algorithms_that_add_in_order(compiled):
    """Which ones cuDNN takes is not in the text."""
    compiled(H100, Case("an update in order", UPDATE, {"model.attention": "cudnn", "trainer.deterministic": "on"}))
