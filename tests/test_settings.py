import dataclasses
import re
from types import SimpleNamespace
from typing import cast

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from small_run import small_config

from dapo_jax.config.values import with_values
from dapo_jax.errors import InputError
from dapo_jax.learner.trained_networks import trained
from dapo_jax.models.architecture import Architecture
from dapo_jax.parallel.compilation import CACHE, ORDERED, OVERLAP
from dapo_jax.parallel.devices import Limits
from dapo_jax.parallel.memory import FRACTION
from dapo_jax.run import meshes, passes, settings
from dapo_jax.run.base_models import read_model
from dapo_jax.run.parts import keep_programs

SMALL = small_config("unused")


def memories(*kinds):
    return lambda: [SimpleNamespace(kind=kind) for kind in kinds]


@pytest.mark.parametrize(
    ("epochs", "given", "steps"), [(None, 7, 7), (3, -1, 7), (3, 100, 7), (3, 7, 7), (3, 6, 6), (1, -1, 2), (4, -1, 10)]
)
def test_the_fewer_steps_of_epochs_and_steps_are_trained(epochs, given, steps):
    """Ten groups per epoch, four per step; the rest of an epoch joins the next one's batch."""
    changes = {"trainer.total_epochs": epochs, "trainer.total_training_steps": given}
    trainer = settings.with_total_steps(small_config("unused", **changes).trainer, 4, 10, done=0)
    assert trainer.total_training_steps == steps


def test_steps_that_end_before_the_epochs_cause_a_warning(caplog):
    config = small_config("unused", **{"trainer.total_epochs": 9, "trainer.total_training_steps": 4})
    settings.with_total_steps(config.trainer, config.data.train_batch_size, 40, done=0)
    assert "total_training_steps=4 ends the run before trainer.total_epochs=9 (90 steps of 4 of 40" in caplog.text


def test_a_warmup_as_long_as_the_epochs_causes_a_warning(caplog):
    changes = {"algorithm.adv_estimator": "gae", "trainer.total_epochs": 1, "trainer.total_training_steps": -1}
    for warmup in (1, 2):
        config = small_config("unused", **changes, **{"trainer.critic_warmup": warmup})
        settings.with_total_steps(config.trainer, config.data.train_batch_size, 8, done=0)
        assert ("critic_warmup leaves no step that updates the policy" in caplog.text) == (warmup == 2)


@pytest.mark.parametrize(
    ("num_prompts", "done", "profiled", "bound"),
    [
        (3, 0, (), "is less than one step: raise it, lower data.train_batch_size"),
        (8, 3, (), "is less than the 3 steps already done: raise it, or choose another workdir"),
        (8, 0, (1, 3), r"must reach trainer.profile_steps=\(1, 3\): raise it"),
    ],
)
def test_epochs_that_do_not_reach_a_step_are_refused(num_prompts, done, profiled, bound):
    changes = {"trainer.total_epochs": 1, "trainer.total_training_steps": -1, "trainer.profile_steps": profiled}
    trainer = small_config("unused", **changes).trainer
    with pytest.raises(ValueError, match=rf"total_epochs=1 \(\d steps of 4 of \d prompts\) {bound}"):
        settings.with_total_steps(trainer, 4, num_prompts, done=done)


def test_epochs_that_do_not_reach_a_batch_to_keep_are_refused():
    changes = {"trainer.total_epochs": 1, "trainer.total_training_steps": -1, "trainer.keep_batches": "1,3"}
    with pytest.raises(ValueError, match="must reach trainer.keep_batches=1,3: raise it"):
        settings.with_total_steps(small_config("unused", **changes).trainer, 4, 8, done=0)


DEVICES = {
    "cpu": SimpleNamespace(platform="cpu", device_kind="cpu", addressable_memories=memories("pinned_host")),
    "tpu": SimpleNamespace(platform="tpu", device_kind="TPU v5 lite"),
    "T4": SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability="7.5"),
    "A100": SimpleNamespace(
        platform="gpu", device_kind="NVIDIA A100-SXM4-80GB", compute_capability="8.0", addressable_memories=memories()
    ),
    "A100 that is here": SimpleNamespace(platform="gpu", addressable_memories=memories("device", "pinned_host")),
    "MI300": SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X", compute_capability="gfx942"),
    "B200": SimpleNamespace(platform="gpu", device_kind="NVIDIA B200", compute_capability="10.0"),
}


def eight(device):
    """Eight devices of one kind, which may be absent."""
    axes = {"data": 8, "fsdp": 1, "tensor": 1}
    return cast(settings.Mesh, SimpleNamespace(devices=np.array([DEVICES[device]] * 8).reshape(8, 1, 1), shape=axes))


def configured(**changes) -> tuple[settings.Config, Architecture]:
    config = with_values(SMALL, {name.replace("__", "."): value for name, value in changes.items()})
    return config, read_model(config.model)[0]


def notes_of(config, arch, mesh):
    return meshes.device_notes(config, mesh, passes.passes(config, arch, mesh))


def test_auto_is_bfloat16_where_the_devices_multiply_it():
    (auto, _), (given, _) = configured(), configured(model__dtype="float32")
    known = {device: eight(device) for device in ("cpu", "tpu", "T4", "A100", "B200", "MI300")}
    fast = {device for device, mesh in known.items() if passes.compute_dtype(auto.model, mesh).name == "bfloat16"}
    assert fast == {"tpu", "A100", "B200", "MI300"}
    assert {passes.compute_dtype(given.model, mesh).name for mesh in known.values()} == {"float32"}


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "tokens", "kernel"),
    [
        ("tpu", "float32", 16, 100, "splash"),
        ("A100", "auto", 128, 20480, "triton"),
        ("A100", "float32", 128, 100, None),
        ("A100", "auto", 512, 100, None),
        ("B200", "auto", 256, 2048, "triton"),
        ("B200", "auto", 256, 2049, "cudnn"),
        ("B200", "auto", 20, 20480, "triton"),
        ("T4", "auto", 64, 100, None),
        ("T4", "bfloat16", 64, 100, None),
        ("MI300", "auto", 64, 100, None),
        ("cpu", "bfloat16", 16, 100, None),
    ],
)
def test_the_default_is_the_best_kernel_that_can_run(device, dtype, head_dim, tokens, kernel, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: DEVICES[device].platform)
    changes = {"model__dtype": dtype, "model__random__head_dim": head_dim, "data__max_response_length": tokens}
    config, arch = configured(**changes)
    assert config.model.attention == "fused"
    chosen = passes.passes(config, arch, eight(device)).attention
    assert chosen.name == (kernel or "xla")
    assert (chosen.shared_width > 0) == (kernel != "cudnn")  # cuDNN's attention shares no prompts
    assert chosen.packs
    copies = dataclasses.replace(config, actor=dataclasses.replace(config.actor, share_prompts=False))
    assert passes.passes(copies, arch, eight(device)).attention.shared_width == 0
    notes = notes_of(config, arch, eight(device))
    found = [note for note in notes if note.startswith("model.attention=fused is xla: the fused kernel needs")]
    assert len(found) == (kernel is None and device != "cpu")


@pytest.mark.parametrize(
    ("device", "attention", "message"),
    [
        ("cpu", "splash", "model.attention=splash needs a TPU, and JAX has cpu: choose"),
        ("tpu", "cudnn", "model.attention=cudnn needs a GPU, and JAX has tpu: choose"),
        ("A100", "cudnn", "model.attention=cudnn needs model.dtype=bfloat16, not float32: choose"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_when_it_is_asked_for(device, attention, message):
    config, arch = configured(model__attention=attention, model__dtype="float32")
    with pytest.raises(ValueError, match=re.escape(message)):
        passes.passes(config, arch, eight(device))


def test_a_note_says_where_passes_are_too_wide_to_share_prompts():
    changes = {"data__max_prompt_length": 2048, "data__max_response_length": 20480}
    note = "passes of 45056 tokens copy the prompt for each response: splash shares it up to 32768 "
    note += "(actor.ppo_max_token_len_per_device)"
    for size, copies in ((1, False), (2, True)):
        config, arch = configured(**changes, actor__ppo_micro_batch_size_per_device=size)
        notes = notes_of(config, arch, eight("tpu"))
        assert [line for line in notes if "copy the prompt" in line] == [note] * copies


def test_notes_say_why_auto_is_float32_and_how_much_of_a_gpu_jax_may_take(monkeypatch):
    monkeypatch.setenv(FRACTION, "0.8")
    config, arch = configured(model__attention="xla")
    slow = "model.dtype=auto is float32: Tesla T4 has no fast bfloat16 products"
    share = "JAX may take 0.8 of each GPU's memory: trainer.gpu_memory_fraction changes it"
    for device, notes in {"cpu": [], "tpu": [], "T4": [slow, share], "A100": [share]}.items():
        assert notes_of(config, arch, eight(device)) == notes


def test_compiler_options_of_a_run_come_before_those_of_the_platform():
    name = "xla_gpu_enable_latency_hiding_scheduler"
    config, arch = configured(trainer__compiler_options=f'{{"{name}": false}}')
    expected = {**OVERLAP["gpu"], name: False}
    assert passes.passes(config, arch, eight("A100")).compiler_options == expected
    assert passes.compiler_options(configured()[0].trainer, eight("tpu")) == {}


def test_a_gpu_adds_in_order_where_it_is_asked_to_and_says_where_it_may_not(monkeypatch):
    config, arch = configured(trainer__deterministic="on", model__attention="cudnn", model__random__head_dim=64)
    assert passes.passes(config, arch, eight("B200")).compiler_options == {**OVERLAP["gpu"], ORDERED: True}
    assert passes.compiler_options(config.trainer, eight("tpu")) == {} and not said_of(config, arch)
    for choice, said in {"auto": True, "off": False}.items():
        config, arch = configured(trainer__deterministic=choice, model__attention="cudnn", model__random__head_dim=64)
        assert ORDERED not in passes.compiler_options(config.trainer, eight("B200"))
        assert said_of(config, arch) == said


def said_of(config, arch):
    return any("cuDNN's backward pass" in note for note in notes_of(config, arch, eight("B200")))


@pytest.mark.parametrize(
    ("platform", "choice", "directory", "seconds"),
    [
        ("cpu", "on", "cache", 1.0),
        ("gpu", "off", "cache", 1.0),
        ("gpu", "auto", "cache", 0.0),
        ("gpu", "on", "run/compiled", 0.0),
    ],
)
def test_a_gpu_keeps_every_program_for_a_restart(platform, choice, directory, seconds, monkeypatch, tmp_path, caplog):
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [jax.config.values[name] for name in names]
    jax.config.update(names[1], 1.0)
    config, _ = configured(trainer__deterministic=choice, trainer__compilation_cache_dir=str(tmp_path / "cache"))
    try:
        keep_programs(config.trainer, tmp_path / "run", resumes=True)
        assert [jax.config.values[name] for name in names] == [str(tmp_path / directory), seconds]
        assert ("may not compute the same bits" in caplog.text) == (directory != "cache")
        if not seconds:  # one that compiles at once is kept too
            jax.jit(lambda x: x * len(str(tmp_path)))(jax.numpy.float32(2)).block_until_ready()
            assert list((tmp_path / directory).glob("jit__lambda*"))
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    monkeypatch.setattr(jax, "default_backend", lambda: "other")
    if choice == "on":
        with pytest.raises(InputError, match="trainer.deterministic=on cannot be had on other"):
            keep_programs(config.trainer, tmp_path, resumes=False)


@pytest.mark.parametrize("changes", [{}, {"model__lora__rank": 4}, {"algorithm__adv_estimator": "gae"}], ids=str)
def test_attention_is_kept_on_accelerators_where_it_fits_by_the_estimate(changes, monkeypatch):
    config, arch = configured(model__enable_gradient_checkpointing=True, **changes)

    def kept(device):
        return passes.remat_policy(config, arch, eight(device))

    found = {device: kept(device) for device in ("cpu", "tpu", "A100", "MI300")}  # the last one's memory is not known
    assert found == {"cpu": "full", "tpu": "attention", "A100": "attention", "MI300": "full"}
    needed = passes.training_bytes(config, arch, eight("tpu"), stores_scores=False, policy="attention")
    for share, policy in ((1.01, "attention"), (0.99, "full")):
        limits = Limits("small", share * needed / passes.FILLED, None, None, None)
        monkeypatch.setattr(passes, "limits_of", lambda device, limits=limits: limits)
        assert kept("tpu") == policy
    given, _ = configured(model__enable_gradient_checkpointing=True, model__remat_policy="dots")
    nothing, _ = configured(model__enable_gradient_checkpointing=False)
    assert [passes.remat_policy(one, arch, eight("tpu")) for one in (given, nothing)] == ["dots", "none"]


@pytest.mark.parametrize("option", ["actor.optim.offload", "model.remat_policy"])
def test_offloading_is_refused_where_the_hosts_memory_is_not_known(option):
    value = "offload" if option == "model.remat_policy" else True
    config = small_config("unused", **{option: value, "model.enable_gradient_checkpointing": True})
    for device, message in {"cpu": "needs devices with their own memory", "A100": "absent GPUs"}.items():
        mesh = eight(device)
        with pytest.raises(ValueError, match=f"{option}={value} .*{message}"):
            meshes.check_memory(trained(config), config.model, mesh)
    meshes.check_memory(trained(config), config.model, eight("A100 that is here"))
    meshes.check_memory(trained(SMALL), SMALL.model, eight("A100"))


def test_gdpo_normalises_every_reward_of_the_config():
    parts = {"reward.functions": '{"right": "arithmetic", "form": {"function": "format", "weight": 0.5}}'}
    further = {"overlong_buffer.enable": True, "overlong_buffer.penalty_factor": 0.3, "length.form": "group"}
    further |= {"length.weight": -0.2, "model.path": "models/scorer", "model.weight": 2.0, "model.function_weight": 3.0}
    for more, expected in (
        ({}, {"right": 1.0, "form": 0.5}),
        (further, {"right": 3.0, "form": 1.5, "reward_model": 2.0, "overlong_reward": 0.3, "length_reward": 0.2}),
    ):
        more = {f"reward.{name}": value for name, value in more.items()}
        config = small_config("unused", **parts, **more, **{"algorithm.adv_estimator": "gdpo"})
        found = settings.algorithm_settings(config.algorithm, config.reward)
        assert dict(zip(found.gdpo_reward_keys, found.gdpo_reward_weights, strict=True)) == expected
    plain = dataclasses.replace(config.algorithm, norm_adv_by_std_in_grpo=False)  # numbers as they are in the reward
    assert settings.algorithm_settings(plain, config.reward).gdpo_reward_weights == (3.0, 1.5, 2.0, 1.0, 1.0)
