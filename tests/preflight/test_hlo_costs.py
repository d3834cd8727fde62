import math
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.preflight.hlo_costs import program_costs
from dapo_jax.preflight.hlo_products import PagedKeys
from dapo_jax.preflight.hlo_text import first_group

LAYERS, B, D, F = 5, 16, 24, 40
HOST = [0] * 8  # all devices on one host


def loss(weights, x):
    def layer(x, weight):
        return jnp.tanh(x @ weight) @ weight.T, None

    return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)


def compiled(function, *arrays):
    """`function` of arrays given as (shape, partition spec), on a mesh of 2 x 2 x 2 devices."""
    mesh = make_mesh(2, 2, 2)
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, spec in arrays
    ]
    return jax.jit(function).lower(*shapes).compile()


def test_products_of_a_loop_count_as_often_as_it_runs():
    program = compiled(jax.grad(loss), ((LAYERS, D, F), ()), ((B, D), ()))
    costs = program_costs(program.as_text(), HOST)
    forward = LAYERS * 2 * 2 * B * D * F
    assert costs.flops == 3 * forward and not costs.unknown
    assert costs.flops > 2 * program.cost_analysis()["flops"]  # XLA counts one iteration


def test_products_are_those_of_one_device():
    whole = program_costs(compiled(loss, ((LAYERS, D, F), ()), ((B, D), ())).as_text(), HOST)
    rows = program_costs(compiled(loss, ((LAYERS, D, F), ()), ((B, D), (("data", "fsdp"),))).as_text(), HOST)
    assert rows.flops == whole.flops / 4


def test_collectives_of_a_loop_by_kind_and_group():
    # weights divided over "fsdp" only: each layer gathers its weight, and the sum over rows is one number
    weights = (LAYERS, D, F), (None, "fsdp")
    costs = program_costs(compiled(loss, weights, ((B, D), (("data", "fsdp"),))).as_text(), HOST)
    gathers = [one for one in costs.collectives if one.kind == "all-gather"]
    assert [(one.group, one.count) for one in gathers] == [(2, LAYERS)]
    assert gathers[0].bytes == LAYERS * D * F * 4 / 2  # each of two devices sends its half
    assert costs.sent >= gathers[0].bytes


def test_a_loop_reads_the_slice_of_a_turn():
    """Stacked weights are read once over all iterations, not once per iteration."""
    costs = program_costs(compiled(loss, ((LAYERS, 512, 512), ()), ((B, 512), ())).as_text(), HOST)
    weights = LAYERS * 512 * 512 * 4
    assert weights <= costs.bytes < 8 * weights


def shortened(name):
    """A part of a program by XLA or libtpu."""
    return (Path(__file__).parent / "data" / f"{name}.hlo").read_text()


TPU = shortened("tpu")  # instructions that only TPUs have


def test_tpu_text():
    costs = program_costs(TPU, HOST[:4])
    # an unrolled loop runs half as often; a gather in two fusions counts once; groups are named by mesh axes
    assert [(one.kind, one.group, one.count, one.bytes) for one in costs.collectives] == [
        ("all-gather", 2, 3, 3 * 8 * 4 * 2)
    ]
    batched = 4 * 2 * 32 * 7 * 16  # 4 products, which a dilated window keeps apart
    splash = 3 * 2 * (2 * 14 * 64)  # a score in each bin and head
    assert costs.flops == batched + splash * 1024 * 1025 / 2 and not costs.unknown  # those below the diagonal
    assert program_costs(TPU, HOST[:4], pairs=7000.0).flops == batched + splash * 7000


def test_what_lies_on_the_chip_is_not_moved():
    everything = re.sub(r"S\(1\)", "", TPU)
    assert program_costs(everything, HOST[:4]).bytes > program_costs(TPU, HOST[:4]).bytes


HBM, CHIP = "{1,0:T(8,128)(2,1)}", "{1,0:T(8,128)(2,1)S(1)}"  # main memory, and on-chip memory managed by the compiler
PART, WHOLE = 16 * 8 * 2, 64 * 8 * 2  # bytes
ONE_OPERATION = shortened("one_operation")
STARTED = "((bf16[64,8]FROM), bf16[16,8]TO, s32[]{:S(2)})"
STARTED_AT = STARTED.replace("FROM", "FROM, s32[]{:T(128)}, s32[]{:T(128)}")
PERMUTED = "(bf16[64,8]FROM, bf16[64,8]TO, u32[]{:S(2)})"


@pytest.mark.parametrize(
    ("line", "of_a", "of_the_other"),
    [
        ("%r = bf16[16,8]TO slice(%a), slice={[0:16], [0:8]}", PART, PART),
        ("%r = bf16[16,8]TO dynamic-slice(%a, %i, %i), dynamic_slice_sizes={16,8}", PART, PART),
        (f"%r = {STARTED} slice-start(%a), slice={{[0:16], [0:8]}}", PART, PART),
        (f"%r = {STARTED_AT} dynamic-slice-start(%a, %i, %i)", PART, PART),
        (f"%r = {STARTED} async-start(%a), calls=%wrapped", PART, PART),
        ("%r = (bf16[16,8]TO, bf16[16,8]FROM, u32[]{:S(2)}) copy-start(%a)", PART, PART),
        ("%r = bf16[16,8]TO slice-done(%a)", 0, 0),
        ("%r = bf16[16,8]TO dynamic-slice-done(%a)", 0, 0),
        ("%r = bf16[16,8]TO copy-done(%a)", 0, 0),
        ("%r = bf16[64,8]FROM dynamic-update-slice(%a, %u, %i, %i)", PART, PART),
        ("%r = bf16[64,8]FROM scatter(%a, %i, %u), to_apply=%wrapped", PART, PART),
        ("%r = bf16[16,8]TO reduce-scatter(%a), replica_groups={{0,1,2,3}}", WHOLE, PART),
        ("%r = bf16[16,8]TO all-to-all(%a), replica_groups={{0,1,2,3}}", WHOLE, PART),
        (f"%r = {PERMUTED} collective-permute-start(%a), source_target_pairs={{{{0,1}}}}", WHOLE, WHOLE),
        ("%r = bf16[16,8]TO collective-permute-done(%a)", 0, 0),
    ],
)
def test_what_one_operation_reads_and_writes(line, of_a, of_the_other):
    """A slice or update counts only its part, asynchronous or not, and only in main memory."""
    text = ONE_OPERATION.replace("LINE", line)

    def moved(source, destination):
        return program_costs(text.replace("FROM", source).replace("TO", destination), [0] * 4).bytes

    found = [moved(*place) for place in ((HBM, CHIP), (CHIP, HBM), (HBM, HBM), (CHIP, CHIP))]
    assert found == [of_a, of_the_other, of_a + of_the_other, 0]


def test_a_fusion_in_a_fusion_reads_and_writes_its_part_of_stacked_arrays():
    """On TPUs, the product of a layer has the slice of its weight in a fusion of its own: all layers were counted."""
    weight, x, result, number = 64 * 8 * 2, 16 * 64 * 2, 16 * 8 * 2, 4
    assert program_costs(shortened("nested_fusion"), HOST).bytes == weight + x + result + number


def test_of_a_conditional_the_dearest_branch_counts_whole():
    def halved(flag, x):
        return jax.lax.fori_loop(0, 3, lambda i, x: jax.lax.cond(flag, lambda x: x @ x @ x, lambda x: x + 1, x), x)

    text = jax.jit(halved).lower(jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((8, 8), "float32"))
    assert program_costs(text.compile().as_text(), [0]).flops == 3 * 2 * 2 * 8**3


def test_a_loop_whose_turns_depend_on_data_is_reported():
    def until(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x)

    costs = program_costs(compiled(until, ((8, 8), ())).as_text(), HOST)
    assert costs.flops == 2 * 8**3
    assert costs.unknown == ("a loop whose turns depend on data, counted once",)


def kernels(text, pairs=None):
    """How often kernels of each class are launched."""
    costs, found = program_costs(text, HOSTS, pairs), Counter()
    for kernel, times in costs.kernels:
        found[kernel.kind] += times
    assert costs.launches == found.total()
    assert sum(times * kernel.flops for kernel, times in costs.kernels) == costs.flops
    return found


def test_kernels_of_a_loop_count_as_often_as_it_runs():
    def of(turns):
        loop = lambda x: jax.lax.fori_loop(0, turns, lambda i, x: jnp.tanh(x @ x), x)  # noqa: E731
        return kernels(jax.jit(loop).lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile().as_text())

    few, many = of(3), of(7)
    assert few["products"] == 3 and many["products"] == 7
    assert (many["elementwise"] - few["elementwise"]) % 4 == 0 < many["elementwise"] - few["elementwise"]


def test_kernels_of_a_gpu_by_class():
    others = {"products": 2, "elementwise": 4}  # a collective is one of these
    assert kernels(GPU) == {"attention": 4, **others}
    assert kernels(GPU.replace("[2,4,64,16]", "[2,4,64,128]")) == {"attention": 2, "wide attention": 2, **others}
    for name in ("paged_attention", "paged_attention_of_runs"):
        text = PAGED.replace("OPERANDS", "%q, %pages, %table, %ends").replace("TARGET", TRITON).replace("NAME", name)
        assert kernels(text.replace("QUERY", BY_HEAD), pairs=PagedKeys(9.0, 9.0, 9.0)) == {"attention": 1}


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_bytes_of_a_copy(kind):
    shape = jax.ShapeDtypeStruct((128, 64), jnp.dtype(kind))
    text = jax.jit(lambda x: x.T + 1).lower(shape).compile().as_text()
    assert program_costs(text, [0]).bytes == 2 * 128 * 64 * jnp.dtype(kind).itemsize


GPU = shortened("gpu")  # instructions that only GPUs have: two hosts with four GPUs each
HOSTS = [0] * 4 + [1] * 4


def test_gpu_products_are_those_of_cudnn_triton_and_cublas():
    costs = program_costs(GPU, HOSTS)
    score, others = (2 + 5 + 2 + 4) * 2 * (2 * 4 * 16), 2 * (2 * 8 * 16 * 32)
    assert costs.flops == score * 64 * 65 / 2 + others and not costs.unknown  # below the diagonal
    assert program_costs(GPU, HOSTS, pairs=100.0).flops == score * 100 + others


PAGED = shortened("paged_attention")  # of 4 rows with 2 key-value heads of 16 to 1024 pages of 32 tokens
BY_ROW, BY_HEAD = "4,2,16,16", "2,32,16"  # 16 or 8 query heads of each
TRITON, MOSAIC = "__gpu$xla.gpu.triton", "tpu_custom_call"


@pytest.mark.parametrize(
    ("target", "name", "operands", "query", "scored", "read"),
    [
        (MOSAIC, "paged_attention", "%table, %ends, %q, %pages", BY_ROW, 300, 300),
        (MOSAIC, "paged_attention_and_runs", "%table, %ends, %q, %pages", BY_ROW, 700, 400),
        (TRITON, "paged_attention", "%q, %pages, %table, %ends, %tail", BY_HEAD, 300, 300),
        (TRITON, "paged_attention_of_runs", "%q, %pages, %table, %ends", BY_HEAD, 400, 100),
    ],
)
def test_paged_attention_reads_the_keys_of_its_rows_or_runs(target, name, operands, query, scored, read):
    text = PAGED.replace("OPERANDS", operands).replace("TARGET", target).replace("NAME", name).replace("QUERY", query)
    costs = program_costs(text, HOST, pairs=PagedKeys(own=300.0, prompts=400.0, read=100.0))
    elements = math.prod(map(int, query.split(",")))
    assert costs.flops == 2 * 2 * scored * elements / 4 and not costs.unknown
    table, tail = (4 * 8 + 4) * 4, ("%tail" in operands) * 4 * 2 * 32 * 32 * 2 * (1 + 32) / (2 * 32)
    assert costs.bytes == pytest.approx(elements * (2 + 4) + table + tail + read * 2 * 32 * 2)


def test_logits_in_blocks_count_their_product():
    text = PAGED.replace("OPERANDS", "%table, %first, %hidden, %temperature").replace("TARGET", TRITON)
    text = text.replace("NAME", "block_sums").replace("q: bf16[QUERY]", "first: s32[2]")
    for name, shape in (
        ("table", "bf16[256,64]"),
        ("first", "s32[2]"),
        ("hidden", "bf16[24,64]"),
        ("temperature", "f32[1]"),
    ):
        text = text.replace("  ROOT", f"  %{name} = {shape} parameter(0)\n  ROOT")
    assert program_costs(text.replace("QUERY", "24,2,128"), HOST).flops == 2 * 256 * 64 * 24
    costs = program_costs(text.replace("QUERY", "24,128").replace("block_sums", "chosen_block"), HOST)
    assert costs.flops == 2 * 24 * 128 * 64  # the table's block is read for each row
    assert costs.bytes == 24 * 128 * (64 * 2 + 4) + 2 * 4 + 24 * 64 * 2 + 4


@pytest.mark.parametrize("target", [TRITON, MOSAIC])
def test_states_are_read_and_written_at_the_places_of_rows(target):
    """4 rows of 32 places; no product of matrices is counted."""
    text = PAGED.replace("OPERANDS", "%ends, %ends, %pool").replace("TARGET", target).replace("NAME", "update_states")
    text = text.replace("f32[QUERY]", "f32[32,2,16,16]").replace("QUERY", "4,2,16")
    costs = program_costs(text.replace("  ROOT", "  %pool = f32[32,2,16,16] parameter(0)\n  ROOT"), HOST)
    assert (costs.flops, costs.bytes) == (0, 2 * 4 * 4 + 2 * 4 * 2 * 16 * 16 * 4) and not costs.unknown


GROUPED = """HloModule jit_f

ENTRY %main (x: bf16[24,64], y: bf16[SECOND]) -> f32[RESULT] {
  %x = bf16[24,64] parameter(0)
  %y = bf16[SECOND] parameter(1)
  ROOT %call.1 = f32[RESULT] custom-call(%x, %y), custom_call_target="TARGET", metadata={op_name="NAME/pallas_call"}
}
"""


@pytest.mark.parametrize(
    ("name", "second", "result"),
    [("grouped_products", "6,64,128", "24,128"), ("grouped_outer_products", "24,128", "6,64,128")],
)
def test_products_of_experts_count_each_row_once_however_many_experts_there_are(name, second, result):
    text = GROUPED.replace("NAME", name).replace("SECOND", second).replace("RESULT", result)
    costs = program_costs(text.replace("TARGET", TRITON), HOST)
    assert costs.flops == 2 * 24 * 64 * 128 and not costs.unknown
    assert program_costs(text.replace("TARGET", MOSAIC), HOST).unknown  # on a TPU the kernel says it itself


def test_gpu_collectives_count_once_and_know_their_hosts():
    weights = 16 * 8 * 2
    collectives = program_costs(GPU, HOSTS).collectives
    found = {(one.kind, one.group, one.per_host): (one.count, one.bytes) for one in collectives}
    assert found == {
        ("all-gather", 4, 4): (1, 3 * weights),
        ("all-gather", 2, 1): (1, weights),
        ("all-reduce", 8, 4): (1, 2 * weights * 7 / 8),
        ("collective-permute", 2, 1): (1, weights),
    }
    assert {one.per_host for one in program_costs(GPU, [0] * 8).collectives} == {8, 4, 2}


def test_unlike_collectives_of_one_channel_all_count():
    shared = GPU.replace("channel_id=2", "channel_id=1")
    assert program_costs(shared, HOSTS).collectives == program_costs(GPU, HOSTS).collectives


def test_scratch_memory_of_a_library_is_not_moved():
    wider = GPU.replace("s8[4194304]", "s8[8388608]")
    assert program_costs(wider, HOSTS).bytes == program_costs(GPU, HOSTS).bytes


def test_gpu_gathers_move_their_operand_and_their_result_once():
    lines = [line for line in GPU.splitlines() if "gather" in line or "ENTRY" in line or "parameter(" in line]
    text = "\n".join(["HloModule f", *lines[2:], "}"])
    assert program_costs(text, HOSTS).bytes == 2 * ((16 + 64) * 8 + (16 + 32) * 8)  # operands and results


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("replica_groups={{0,2},{1,3}}", [0, 2]),
        ("replica_groups=[2,2]<=[4]", [0, 1]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [0, 2]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [0, 2]),
        ("replica_groups=mesh['a'=8,'b'=1] {'a':(2)2}", [0, 2]),
        ("", [0, 1, 2, 3]),
    ],
)
def test_groups_however_they_are_written(groups, devices):
    assert first_group(groups, 4) == devices
