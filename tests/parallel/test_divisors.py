"""If sizes do not divide, the message suggests values that do: each suggestion is tried."""

import itertools
import re
from types import SimpleNamespace

import jax
import pytest
from shapes import ARCH
from small_run import small_config

from dapo_jax.command.validation import validate
from dapo_jax.errors import divisors, nearest
from dapo_jax.models.weights import weight_table
from dapo_jax.parallel.mesh import make_mesh, split_devices
from dapo_jax.parallel.sharding import TRAIN_RULES, indivisible_weights
from dapo_jax.run.base_models import read_model
from dapo_jax.run.meshes import check_weights, make_meshes


def numbers_of(message: str, option: str) -> list[int]:
    """The values that the last "OPTION=1, 2 or 3" of a message suggests."""
    found = re.findall(re.escape(option) + r"=((?:\d+, )*\d+(?: or \d+)?)", message.partition(": set ")[2])
    return [int(number) for number in re.findall(r"\d+", found[-1])] if found else []


def test_the_nearest_in_their_order():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert nearest(divisors(24), 32) == "8, 12 or 24" and nearest([5], 1) == "5" and nearest([], 1) == ""


@pytest.mark.parametrize("count", [1, 2, 6, 8])
@pytest.mark.parametrize("data", [-1, 1, 2, 3])
def test_axes_that_do_not_make_up_the_devices_are_refused_with_some_that_do(data, count):
    devices = jax.devices()[:count]
    for fsdp, tensor in itertools.product((1, 2, 3, 8), (1, 2, 3)):
        if data * fsdp * tensor == count or data == -1 and count % (fsdp * tensor) == 0:
            assert make_mesh(data, fsdp, tensor, devices).size == count
            continue
        with pytest.raises(ValueError, match=f"devices, {count} .cpu.: set ") as refused:
            make_mesh(data, fsdp, tensor, devices)
        message = str(refused.value)
        proposed_fsdp = numbers_of(message, "mesh.fsdp") or [fsdp]
        proposed_tensor = numbers_of(message, "mesh.tensor") or [tensor]
        assert "mesh.data=0" not in message and ("set mesh.data=-1" in message) == (data != -1)
        for one, other in itertools.product(proposed_fsdp, proposed_tensor):
            assert make_mesh(-1, one, other, devices).size == count


def test_devices_that_sample_are_proposed():
    with pytest.raises(ValueError, match="trainer.rollout_devices=3 must") as refused:
        split_devices(3, 2)
    for proposed in numbers_of(str(refused.value), "trainer.rollout_devices"):
        training, sampling = split_devices(proposed, 2)
        assert len(training) % 2 == 0 and len(sampling) == proposed


def test_one_number_divides_all_dimensions_of_an_axis():
    query = SimpleNamespace(path=("query",), shape=(12, 5), axes=("heads", "layers"))
    key = SimpleNamespace(path=("key",), shape=(6,), axes=("kv_heads",))
    problems = indivisible_weights([query, key], {"tensor": 4, "fsdp": 1, "data": 1}, TRAIN_RULES)
    assert len(problems) == 1 and numbers_of(problems[0], "mesh.tensor") == [2, 3, 6]
    problems = indivisible_weights(weight_table(ARCH), {"data": 1, "fsdp": 5, "tensor": 4}, TRAIN_RULES)
    assert any("kv_heads" in line and "mesh.tensor=4" in line for line in problems)
    assert any("embed" in line and "mesh.fsdp=5" in line for line in problems)


@pytest.mark.parametrize(
    "changes",
    [
        {"data.train_batch_size": 24, "actor.ppo_mini_batch_size": 16},
        {"data.train_batch_size": 12, "actor.ppo_mini_batch_size": 16},
        {"actor.ppo_micro_batch_size_per_device": 5, "actor.use_dynamic_bsz": False},
    ],
)
def test_batches_are_proposed_that_fit(changes):
    with pytest.raises(ValueError, match="must be a multiple") as refused:
        validate(small_config("unused", **changes))
    tried = 0
    for option in ("data.train_batch_size", "actor.ppo_mini_batch_size", "actor.ppo_micro_batch_size_per_device"):
        for number in numbers_of(str(refused.value), option):
            validate(small_config("unused", **{**changes, option: number}))
            tried += 1
    assert tried > 1


@pytest.mark.parametrize(("devices", "micro"), [(8, 3), (8, 16), (6, 4), (5, 1)])
def test_batches_are_proposed_that_the_mesh_divides(devices, micro):
    batches = {"actor.ppo_mini_batch_size": 4, "data.train_batch_size": 8, "rollout.n": 4}
    changes = {**batches, "actor.ppo_micro_batch_size_per_device": micro, "actor.use_dynamic_bsz": False}
    config = small_config("unused", **changes)
    arch, used = read_model(config.model)[0], jax.devices()[:devices]
    with pytest.raises(ValueError, match="must be a multiple of") as refused:
        make_meshes(config, arch, used)
    check_weights(arch, make_mesh(-1, 1, 1, used))  # an evaluation or an export has no batches
    mini, small = "actor.ppo_mini_batch_size", "actor.ppo_micro_batch_size_per_device"
    proposed = [{mini: size, "data.train_batch_size": size} for size in numbers_of(str(refused.value), mini)]
    proposed += [{small: size} for size in numbers_of(str(refused.value), small)]
    assert proposed
    for one in proposed:
        make_meshes(small_config("unused", **{**changes, **one}), arch, used)
