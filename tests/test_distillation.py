"""Whole runs with a teacher, and teachers that are refused. Options that do not go with one: command/messages.yaml."""

import dataclasses

import numpy as np
import pytest
from config_problems import config_with
from shapes import mesh_of, one_device_mesh
from small_families import with_tokenizer
from small_run import resumed, small_config
from test_export import save_checkpoint

from dapo_jax.data.tokenizer import character_tokenizer
from dapo_jax.errors import InputError
from dapo_jax.learner.trained_networks import trained
from dapo_jax.models.attention import XLA
from dapo_jax.monitor.recipe import write_config
from dapo_jax.monitor.records import read_metrics
from dapo_jax.run.base_models import read_architecture_of, read_model
from dapo_jax.run.held_out import mean_accuracy
from dapo_jax.run.networks import check_vocabulary, load_teacher
from dapo_jax.run.settings import actor_settings, all_micro_batches
from dapo_jax.training.loop import train

NAME = "algorithm.distillation"
QUIET = {"trainer.test_freq": -1, "trainer.val_before_train": False, "trainer.save_freq": -1}
ALONE = {  # no verdict on any response
    **QUIET,
    f"{NAME}.use_task_rewards": False,
    "algorithm.filter_groups.enable": False,
    "data.gen_batch_size": 4,
    "reward.function": "none",
}
TOP_K = {f"{NAME}.form": "top_k", f"{NAME}.top_k": 6}
FORMS = pytest.mark.parametrize("form", [{}, {**TOP_K, f"{NAME}.top_k": 40}], ids=["sampled", "top_k"])


@pytest.mark.short("sampled")
@FORMS
def test_a_student_comes_closer_to_its_teacher_without_any_verdict(tmp_path, form):
    teacher = small_config(tmp_path / "teacher")  # a run whose policy has other random weights
    save_checkpoint(teacher)
    write_config(teacher.workdir, dataclasses.asdict(teacher))
    learns = {f"{NAME}.path": teacher.workdir, "trainer.total_training_steps": 12, "actor.optim.lr": 1e-2}
    learns["trainer.test_freq"] = 12
    train(small_config(tmp_path / "student", **{**ALONE, **form, **learns}))
    rows = read_metrics(tmp_path / "student")
    divergence = [row["distillation/reverse_kl"] for row in rows]
    assert len(divergence) == 12 and np.mean(divergence[-3:]) < 0.5 * np.mean(divergence[:3])
    assert any("eval/" in name for name in rows[-1]) and mean_accuracy(rows[-1]) is None, "nothing says what is right"
    assert not any("/acc/" in name or row[name] and name == "alarm/all_uniform" for row in rows for name in row)


@pytest.mark.slow
@pytest.mark.long("sampled")  # test_experts_run has the other form
@FORMS
def test_a_run_with_a_teacher_resumes_as_if_not_stopped(tmp_path, monkeypatch, form):
    resumed(tmp_path, monkeypatch, {f"{NAME}.path": "random", **form})


@pytest.mark.slow
@pytest.mark.long("recompute")
@pytest.mark.parametrize("old", ["rollout", "recompute", "auto"])
def test_a_policy_with_adapters_and_a_teacher_of_another_architecture(tmp_path, old):
    changes = {f"{NAME}.path": with_tokenizer("qwen3_qknorm", tmp_path), "model.lora.rank": 2, "actor.old_logprob": old}
    train(small_config(tmp_path / "run", **{**ALONE, **TOP_K, **changes, "trainer.total_training_steps": 1}))
    (row,) = read_metrics(tmp_path / "run")
    assert row["distillation/reverse_kl"] > 0 and row["actor/distillation_loss"] > 0


def test_another_vocabulary_is_refused():
    own = character_tokenizer()
    paths = "models/student", "models/teacher"
    check_vocabulary(*paths, own, own)
    richer = character_tokenizer()
    richer.backend.add_tokens(["<new>"])
    check_vocabulary(*paths, own, richer)
    with pytest.raises(InputError, match=r"distillation.path=models/teacher must .* model.path=models/student, but 1 "):
        check_vocabulary(*paths, richer, own)


def teacher_of(config, mesh):
    policy = actor_settings(config, read_model(config.model)[0], mesh)
    return load_teacher(config, policy, character_tokenizer(), mesh)


def test_a_teacher_that_the_mesh_or_the_candidates_do_not_fit_is_refused(tmp_path):
    config = config_with({f"{NAME}.path": "random", f"{NAME}.form": "top_k", f"{NAME}.top_k": 99})
    with pytest.raises(InputError, match="top_k=99 must be at most the 49 tokens"):
        teacher_of(config, one_device_mesh())
    config = config_with({f"{NAME}.path": with_tokenizer("qwen3_qknorm", tmp_path)})
    with pytest.raises(InputError, match=rf"the mesh does not fit {NAME}.path=.*qwen3_qknorm: mesh.tensor=8 must"):
        teacher_of(config, mesh_of((1, 1, 8)))


def test_a_teacher_chooses_its_experts_itself(tmp_path):
    path = with_tokenizer("qwen3_moe", tmp_path)
    config = config_with({f"{NAME}.path": path, "model.path": path})
    mesh = one_device_mesh()
    of_policy = all_micro_batches(trained(config), config.model, XLA, read_architecture_of(config.model), mesh)
    assert of_policy["actor"].choices is not None, "the policy replays what the sampler chose"
    assert teacher_of(config, mesh).micro_batches.choices is None
