"""The mesh that trains and the mesh that samples, on the same devices."""

import dataclasses
import re

import jax
import pytest
import small_experts
from shapes import ARCH
from small_policy import actor_on
from small_run import (
    DAMPED,
    assert_same_policy,
    load_config,
    rounding_decides,
    rows_without_clock,
    small_config,
)

from dapo_jax.config.values import freeze
from dapo_jax.models.architecture import Delta, Layer
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.weights import weight_table
from dapo_jax.parallel.devices import GIB, Limits
from dapo_jax.parallel.mesh import make_mesh, with_tensor
from dapo_jax.preflight.report import read_shape
from dapo_jax.run import passes
from dapo_jax.run.meshes import check_weights, make_meshes
from dapo_jax.run.passes import training_bytes
from dapo_jax.training.loop import train

DIVIDED = {"mesh.fsdp": 4, "mesh.tensor": 2, "rollout.n": 8, "actor.ppo_mini_batch_size": 2}


def shapes(**changes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    config = small_config("unused", **{**DIVIDED, "actor.ppo_micro_batch_size_per_device": 2, **changes})
    training, sampling = make_meshes(config, ARCH)
    assert [*training.devices.flat] == [*sampling.devices.flat]
    return training.devices.shape, sampling.devices.shape


def test_training_takes_the_least_tensor_that_fits(monkeypatch):
    assert shapes() == ((1, 8, 1), (1, 4, 2))
    assert shapes(**{"mesh.data": 2, "mesh.fsdp": 2}) == ((2, 4, 1), (2, 2, 2))
    # 16 responses are not micro-batches of 4 on 8 devices, and 8 of them give no row to each of 16
    by_rows = {"actor.ppo_micro_batch_size_per_device": 4, "actor.use_dynamic_bsz": False}
    assert shapes(**by_rows) == ((1, 4, 2), (1, 4, 2))
    assert shapes(**{"rollout.n": 2}) == ((1, 4, 2), (1, 4, 2))
    tight = Limits("a small device", 1e5, None, None, None)
    monkeypatch.setattr(passes, "limits_of", lambda device: tight)
    assert shapes() == ((1, 4, 2), (1, 4, 2))


def test_mesh_train_tensor_is_taken_as_given():
    assert shapes(**{"mesh.train_tensor": 2}) == ((1, 4, 2), (1, 4, 2))
    assert shapes(**{"mesh.fsdp": 8, "mesh.tensor": 1, "mesh.train_tensor": 2}) == ((1, 4, 2), (1, 8, 1))


def test_what_does_not_fit_is_refused_with_values_that_do():
    by_rows = {"actor.ppo_micro_batch_size_per_device": 4, "actor.use_dynamic_bsz": False}
    for changes, message in (
        ({"mesh.train_tensor": 3}, "mesh.train_tensor=3 must divide mesh.fsdp x mesh.tensor = 8: set"),
        ({"mesh.train_tensor": 4}, "mesh.train_tensor = 4 must divide the kv_heads dimension of layers.key, 2: set"),
        ({"mesh.train_tensor": 1, **by_rows}, "x 8 devices that rows are divided over"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as refused:
            shapes(**changes)
        proposed = re.findall(r"set (mesh\.train_tensor|actor\.ppo_\w+)=([\d, or]+)", str(refused.value))
        assert proposed
        for option, values in proposed:
            for value in re.findall(r"\d+", values):
                shapes(**{**changes, option: int(value)})


def test_an_axis_of_experts_divides_experts_in_training_and_sampling():
    config = small_config("unused", **{"mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2, "rollout.n": 8})
    with pytest.raises(ValueError, match="mesh.expert=2 divides experts, but model.path has none: set it to 1"):
        make_meshes(config, ARCH)
    arch = small_experts.ARCH  # 6 experts
    with pytest.raises(ValueError, match="mesh.expert=2 x mesh.tensor=2 must divide the expert dimension .* 6: set"):
        make_meshes(config, arch)
    arch = dataclasses.replace(arch, experts=dataclasses.replace(arch.experts, number=8))
    training, sampling = make_meshes(config, arch)
    assert dict(sampling.shape) == {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}
    assert dict(training.shape) == {"data": 1, "fsdp": 4, "expert": 2, "tensor": 1}


def test_stops_that_a_state_has_seen_past_are_refused_before_anything_is_loaded():
    arch = read_architecture(small_experts.MODEL.with_name("qwen3_5"))
    stops = {"rollout.stop": ("\n",), "mesh.data": 8}
    make_meshes(small_config("unused", **stops), arch)
    with pytest.raises(ValueError, match="rollout.stop ends turns after a device has gone on"):
        make_meshes(small_config("unused", **stops, **{"environment.path": "envs.py:Game"}), arch)


def test_channels_of_the_last_tokens_that_tensor_does_not_divide_are_refused():
    """Those of a single key head of odd size; sizes of published models are multiples of 128."""
    arch = read_architecture(small_experts.MODEL.with_name("qwen3_5"))
    odd = dataclasses.replace(arch, delta=dataclasses.replace(arch.delta, key_heads=1, key_dim=1))
    message = (
        "mesh.tensor=4 must divide the 150 channels that a layer .* keeps of the last tokens: set mesh.tensor=1 or 2"
    )
    check_weights(odd, make_mesh(1, 4, 2))
    with pytest.raises(ValueError, match=message):
        check_weights(odd, make_mesh(1, 2, 4))
    with pytest.raises(ValueError) as refused:
        check_weights(arch, make_mesh(1, 2, 4))  # whose two key heads of attention it does not divide
    assert "last tokens" not in str(refused.value)


def test_context_is_a_part_of_the_devices_that_train():
    small = small_config("unused", **{**DIVIDED, "mesh.context": 2})
    training, sampling = make_meshes(small, ARCH)
    assert dict(training.shape) == {"data": 1, "fsdp": 4, "context": 2, "tensor": 1}
    assert dict(sampling.shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    delta = Delta(key_heads=2, value_heads=4, key_dim=8, value_dim=12, filter_width=4)
    kinds = dataclasses.replace(ARCH, pattern=(Layer(delta=True), Layer()), delta=delta)
    for arch, changes, message in (
        (ARCH, {"mesh.context": 3}, "=3 must divide .* / mesh.train_tensor = 4: set mesh.context=1, 2 or 4"),
        (kinds, {"mesh.context": 2}, "=2 x 2 devices along tensor .* the 2 key heads of .*: set mesh.context=1"),
    ):
        config = small_config("unused", **{**DIVIDED, "mesh.train_tensor": 2, **changes})
        with pytest.raises(ValueError, match=message):
            make_meshes(config, arch)


def test_groups_along_tensor_stay_where_they_were():
    mesh = make_mesh(2, 1, 4)
    for size in (1, 2):
        old = [{*group} for group in mesh.devices.reshape(-1, 4)]
        for group in with_tensor(mesh, size).devices.reshape(-1, size):
            assert any({*group} <= one for one in old)


def test_the_estimate_of_memory_is_near_what_is_compiled():
    """7B on v5e:8x8, one row of 2048 + 20480 tokens for each share of the mesh."""
    values = load_config("dapo_qwen2.5_7b_math")
    values.data.max_response_length = 20480
    values.actor.ppo_micro_batch_size_per_device = 1
    config = freeze(values)
    found = []
    for tensor, context in ((1, 1), (1, 4), (4, 1)):
        sizes = {"data": 1, "fsdp": 64 // (tensor * context), "context": context, "tensor": tensor}
        mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
        found.append(training_bytes(config, read_shape(config.model), mesh, stores_scores=False) / GIB)
    assert found[2] < found[1] < 0.6 * found[0]  # "tensor" divides tables too
    for tensor, compiled in ((1, 18.95), (2, 12.45), (4, 8.84)):
        mesh = jax.sharding.AbstractMesh((1, 64 // tensor, tensor), ("data", "fsdp", "tensor"))
        found = training_bytes(config, read_shape(config.model), mesh, stores_scores=False) / GIB
        assert found == pytest.approx(compiled, abs=2.5)


def test_no_matrix_is_whole_on_a_device_on_its_way_to_the_sampler():
    sampling = make_mesh(1, 4, 2)
    actor = actor_on(with_tensor(sampling, 1), decode_mesh=sampling)
    lowered = actor.decode_weights.lower(actor.trainable.state_shape.params)
    compiled = lowered.compile()
    shards = {
        sharding.shard_shape(leaf.shape)
        for leaf, sharding in zip(
            jax.tree.leaves(lowered.out_info), jax.tree.leaves(compiled.output_shardings), strict=True
        )
    }
    sizes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())}
    whole = {weight.shape[weight.stacked :] for weight in weight_table(ARCH) if weight.is_matrix} - shards
    assert shards <= sizes and len(whole) > 3 and not {shape[shape[0] == 1 :] for shape in sizes} & whole


@pytest.mark.slow
def test_a_run_resumes_with_another_train_tensor(tmp_path, monkeypatch):
    """The tokens are those of a run whose training is divided otherwise, and so is the policy up to rounding."""
    alike = (resumes_alike(seed, tmp_path / str(seed), monkeypatch) for seed in range(3))
    assert any(alike), "rounding decides each time"


def resumes_alike(seed, folder, monkeypatch):
    """Whether a run that is divided otherwise is equal; AssertionError if it is not, and rounding is not why."""
    changes = {**DAMPED, "seed": seed}
    params = jax.device_get(train(small_config(folder / "whole", **changes)).actor.params)
    rows = rows_without_clock(folder / "whole")

    def assert_alike(models, workdir):
        for name in ("step", "reward/num_errors", "rollout/response_length/mean", "critic/score/mean"):
            assert [row.get(name) for row in rows_without_clock(workdir)] == [row.get(name) for row in rows]
        assert_same_policy(models, params, 1e-5)

    for steps, size in ((2, 2), (4, 1)):
        mesh = {"mesh.fsdp": 4, "mesh.tensor": 2, "mesh.train_tensor": size, "trainer.total_training_steps": steps}
        models = train(small_config(folder / "divided", **changes, **mesh))
    query = models.actor.params["layers"]["query"]
    assert query.sharding.mesh.shape == {"data": 1, "fsdp": 8, "tensor": 1}
    try:
        assert_alike(models, folder / "divided")
        return True
    except AssertionError:
        if not rounding_decides(lambda to: assert_alike(train(small_config(to, **changes)), to), folder, monkeypatch):
            raise
        return False
