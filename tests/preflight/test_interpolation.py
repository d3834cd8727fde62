import jax
import numpy as np
import pytest
from small_run import small_config

from dapo_jax.base_models import read_model
from dapo_jax.parallel.mesh import Meshes, make_mesh
from dapo_jax.preflight.compiled import Compiled, compile_program
from dapo_jax.preflight.hlo_costs import Collective, Costs
from dapo_jax.preflight.interpolation import complete, to_compile
from dapo_jax.preflight.lengths import parse_lengths
from dapo_jax.preflight.programs import CACHE, DECODING, KINDS, Program, step_programs


def decode(rows, window, family="decode", calls=1.0):
    features = (1.0, rows, rows * 16, rows * window)
    name = f"{family}, {rows} rows, window {window}"
    return Program("decode", name, calls, lambda: pytest.fail(), {CACHE: rows * window}, {}, family, features)


def measured(program, costs: Costs | None) -> Compiled:
    sizes = {kind: program.inside.get(kind, 0.0) for kind in KINDS}
    return Compiled(program, {**sizes, "temporaries": 5.0 + program.features[1]}, costs, 1.0)


def linear(program):
    """Costs that are linear in the features."""
    _, rows, _, keys = program.features
    sent = Collective("all-reduce", 4, 4, 2.0, 3.0 * rows)
    return measured(program, Costs(7.0 * rows + 0.5 * keys, 1000.0 + 2.0 * keys, (sent,)))


PATH = [decode(rows, window) for window in (64, 128, 192, 256, 512) for rows in (8, 16, 24, 32) if rows * window < 9000]


def test_linear_costs_are_found_exactly_from_as_many_programs_as_features():
    chosen = to_compile(PATH)
    assert len(chosen) == 3  # all have prompts of one width: two of the four features are one
    for found, expected in zip(complete(PATH, [linear(one) for one in chosen]), map(linear, PATH), strict=True):
        assert found.program is expected.program
        assert (found.compile_s is None) == (found.program not in chosen)
        assert found.bytes == pytest.approx(expected.bytes)
        assert found.costs is not None and expected.costs is not None
        assert found.costs.flops == pytest.approx(expected.costs.flops)
        assert found.costs.bytes == pytest.approx(expected.costs.bytes)
        (sent,) = found.costs.collectives
        assert (sent.kind, sent.group) == ("all-reduce", 4)
        assert (sent.count, sent.bytes) == pytest.approx((2.0, expected.costs.sent))


def test_the_program_with_the_most_cache_is_compiled_and_families_stay_apart():
    alone = Program("update", "optimizer step", 1.0, lambda: pytest.fail(), {})
    other = [decode(rows, 64, "other") for rows in (8, 16, 24)]
    chosen = to_compile([*PATH, alone, *other])
    assert alone in chosen and max(PATH, key=lambda one: one.inside[CACHE]) in chosen
    assert [one.name for one in chosen if one in other] == [other[0].name, other[2].name]
    assert to_compile([PATH[0]]) == [PATH[0]]


def test_programs_of_no_family_are_all_compiled_even_if_they_share_a_name():
    """The update of one shape computes more scores of attention for long sequences than for short ones."""
    pairs = [Program("update", "gradients", 1.0, lambda: pytest.fail(), {}, pairs=pairs) for pairs in (10.0, 20.0)]
    caches = [Program("prefill", "prefill", 1.0, lambda: pytest.fail(), {CACHE: size}) for size in (1.0, 2.0)]
    assert to_compile([*pairs, *caches]) == [*pairs, *caches]


def test_what_does_not_compile_has_no_costs_to_interpolate():
    chosen = to_compile(PATH)
    compiled = [linear(chosen[0]), *(measured(one, None) for one in chosen[1:])]
    found = complete(PATH, compiled)
    assert sum(one.costs is not None for one in found) == 1 and len(found) == len(PATH)


@pytest.mark.full
def test_interpolated_costs_are_those_of_compiled_programs():
    """Of all programs that decode, for lengths whose waves become narrow and grow to the last window."""
    changes = {"mesh.fsdp": 4, "mesh.tensor": 2, "rollout.max_num_seqs": 256, "data.arithmetic.num_heldout": 0}
    changes |= {"data.train_batch_size": 32, "data.gen_batch_size": 32, "data.max_response_length": 400}
    config = small_config("unused", **changes)
    mesh = make_mesh(1, 4, 2)
    lengths = parse_lengths("lognormal:median=60,sigma=1", config.data)
    step = step_programs(config, read_model(config)[0], Meshes(mesh, mesh), lengths=lengths, memory=1e9)
    programs = [program for program in step.programs if program.stage == "decode"]
    chosen = {program.key for program in to_compile(programs)}
    assert len(chosen) < len(programs) / 2
    with jax.set_mesh(mesh):
        compiled = [compile_program(program, mesh, "") for program in programs]
    found = complete(programs, [one for one in compiled if one.program.key in chosen])
    for name in ("flops", "bytes", "sent"):
        exact = np.array([getattr(one.costs, name) for one in compiled])
        near = np.array([getattr(one.costs, name) for one in found])
        calls = np.array([program.calls for program in programs])
        assert calls @ near == pytest.approx(calls @ exact, rel=1e-3), name
        decoding = np.array([DECODING in program.inside for program in programs])
        np.testing.assert_allclose(near[decoding], exact[decoding], rtol=1e-3, err_msg=name)
        # of copies, one fusion in some and two in others
        np.testing.assert_allclose(near, exact, rtol=0.1, err_msg=name)
