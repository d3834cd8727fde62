"""Laws: a mesh that divides the tokens of sequences trains as one device, and no device holds all of a sequence."""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from shapes import ARCH, mesh_of, one_device_mesh
from small_experts import MODEL
from small_policy import actor_settings, bins, plain_batch
from small_run import DAMPED, assert_same_policy, rows_without_clock, small_config

from dapo_jax.learner.actor import loss_fn
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.weights import init_params, weight_shardings, weight_table
from dapo_jax.parallel.mesh import make_mesh, num_batch_shards, with_tensor
from dapo_jax.parallel.sharding import TRAIN_RULES, batch_sharding
from dapo_jax.training.loop import train

WIDTH, RESPONSE = 96, 72  # of bins and responses; no model has a dimension of WIDTH, or of WIDTH by a size of "context"


@functools.cache
def batch_of():
    """Two groups of responses, of which some share a bin with their prompt, and some fill one."""
    rng = np.random.default_rng(0)
    mask = np.arange(RESPONSE) < np.array([72, 9, 1, 14, 40, 3, 20, 10])[:, None]
    prompt_mask = np.arange(24) >= np.array([[0], [9]])
    noise = rng.normal(0, 0.3, mask.shape).astype(np.float32) * mask
    return plain_batch(
        prompt_mask,
        mask,
        prompts=rng.integers(3, 60, prompt_mask.shape, np.int32) * prompt_mask,
        responses=rng.integers(3, 60, mask.shape, np.int32) * mask,
        advantages=(rng.normal(size=(len(mask), 1)) * mask).astype(np.float32),
        old_logprobs=noise - 4 * mask,
        ref_logprobs=noise - 3 * mask,
        loss_weights=(mask / mask.sum()).astype(np.float32),
    )


def gradient(arch, mesh, **changes) -> tuple[Any, Any]:
    """The loss of one packed pass and its gradient; with the program."""
    terms = {"entropy_coeff": 0.01, "kl_loss_coef": 0.1, "loss_mode": "gspo", "logprob_chunk_size": 16, **changes}
    settings, shards = actor_settings(arch=arch, **terms), num_batch_shards(mesh)
    split = bins(shards, WIDTH * (3 if shards == 1 else 1), parts=mesh.shape.get("context", 1))
    with jax.set_mesh(mesh):
        (piece,) = split.split(batch_of())
        assert piece.micro_batch.bins.tokens.shape[1] == WIDTH
        batch = jax.device_put(piece.micro_batch, batch_sharding(mesh))
        params = jax.device_put(random_params(arch), weight_shardings(weight_table(arch), mesh, TRAIN_RULES))
        function = jax.value_and_grad(lambda params, batch: loss_fn(params, None, batch, settings)[0])
        program = jax.jit(function).lower(params, batch).compile()
        return jax.device_get(program(params, batch)), program


@functools.cache
def random_params(arch):
    return jax.device_get(jax.jit(init_params, static_argnums=0)(arch, 0))


def assert_same(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(np.abs(other).max(), 1e-6))


def sizes(program) -> set[tuple[int, ...]]:
    """The dimensions of each array of a program, without those of 1."""
    found = re.findall(r"(?:f32|bf16)\[([\d,]+)\]", program.as_text())
    return {tuple(size for size in map(int, shape.split(",")) if size > 1) for shape in found}


def test_tokens_over_devices_give_the_gradient_of_one_and_no_device_has_all_of_a_sequence():
    """Shared prompts, packed, with a loss of whole sequences, and heads that "tensor" divides too."""
    arch = dataclasses.replace(ARCH, num_heads=6, sinks=True)  # two devices have copies of 3 heads' keys
    expected, whole = gradient(arch, one_device_mesh())
    found, program = gradient(arch, with_tensor(mesh_of((1, 2, 2)), 2, 2))
    assert_same(found, expected)
    width = {ARCH.hidden_size, ARCH.hidden_size // 2, ARCH.intermediate_size // 2}
    assert any(WIDTH in one and width & {*one} for one in sizes(whole))
    assert not any(WIDTH in one and width & {*one} for one in sizes(program))


FAMILIES = {
    "llama": ARCH,
    "mixture with linear attention": read_architecture(MODEL.with_name("qwen3_5_moe")),
    "sinks and windows": read_architecture(MODEL.with_name("gpt_oss")),
}
NOISE = 1e-4  # of a recurrence and of routers: over "fsdp" alone, gradients differ by 3e-5 of the largest


@pytest.mark.slow
@pytest.mark.long("linear")
@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_depends_on_the_devices_of_a_sequence(name):
    """A mixture with experts on other devices; fewer key-value heads than devices, which have copies."""
    arch = FAMILIES[name]
    mesh = with_tensor(make_mesh(1, 4, 1, jax.devices()[:4]), 1, 4)
    if arch.experts is not None:
        mesh = with_tensor(make_mesh(1, 4, 1, expert=2), 1, 2)
    found, program = gradient(arch, mesh, logprob_chunk_size=1000, remat="attention")
    assert_same(found, gradient(arch, one_device_mesh())[0], 1e-5 if arch.experts is None else NOISE)
    if "expert" not in mesh.shape:  # whose devices gather each other's tokens
        assert not any({WIDTH, arch.hidden_size} <= {*one} for one in sizes(program))


@pytest.mark.slow
def test_temporaries_fall_with_the_devices_of_a_sequence():
    arch = dataclasses.replace(ARCH, num_kv_heads=4)
    programs = [gradient(arch, with_tensor(mesh_of((1, size, 1)), 1, size))[1] for size in (1, 2, 4)]
    used = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert used[1] < 0.6 * used[0] and used[2] < 0.65 * used[1]


@pytest.mark.slow
def test_a_run_on_devices_that_share_sequences_is_that_of_others_and_resumes_on_them(tmp_path):
    options = {**DAMPED, "algorithm.use_kl_in_reward": True}  # whose reference reads tokens during sampling
    params = jax.device_get(train(small_config(tmp_path / "whole", **options)).actor.params)
    rows = rows_without_clock(tmp_path / "whole")
    mesh = {"mesh.fsdp": 4, "mesh.tensor": 2}
    for steps, tensor, context in ((2, 2, 2), (4, 1, 4)):
        changes = {"mesh.train_tensor": tensor, "mesh.context": context, "trainer.total_training_steps": steps}
        models = train(small_config(tmp_path / "divided", **options, **mesh, **changes))
    query = models.actor.params["layers"]["query"]
    assert query.sharding.mesh.shape == {"data": 1, "fsdp": 2, "context": 4, "tensor": 1}
    assert query.addressable_shards[0].data.size * 8 == query.size
    assert_same_policy(models, params, 1e-5)
    found = rows_without_clock(tmp_path / "divided")
    for name in ("step", "rollout/response_length/mean", "critic/score/mean", "rollout/seq_final_reward/mean"):
        assert [row.get(name) for row in found] == pytest.approx([row.get(name) for row in rows], abs=1e-5)
