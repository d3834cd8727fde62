"""A run resumes only with the models and the scale of adapters that it was trained with."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from reward_model_files import write_reward_model
from safetensors.numpy import load_file, save_file
from shapes import ARCH, mesh_of
from small_families import changes_of, with_tokenizer
from small_run import copied, saved, small_config
from test_export import DATA

from dapo_jax.config.values import with_values
from dapo_jax.evaluate.evaluate import bench
from dapo_jax.export.export import export
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.identity import differences, identity
from dapo_jax.monitor.records import read_metrics
from dapo_jax.run.base_models import load_policy
from dapo_jax.run.other_runs import Origin
from dapo_jax.training import state
from dapo_jax.training.loop import train

MODEL = "llama_tied"


def replace_weights(directory):
    """Changes one number of one tensor, as another file of the same model would."""
    file = Path(directory) / "model.safetensors"
    tensors = load_file(file)
    name = max(tensors)
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[7] *= 1.01
    save_file(tensors, file)


def test_a_digest_is_of_the_weights_alone(tmp_path):
    directory, arch = with_tokenizer(MODEL, tmp_path), read_architecture(DATA / MODEL)
    expected = load_policy(directory, arch, mesh_of((1, 1, 1))).digest
    assert load_policy(directory, arch, mesh_of((2, 1, 2))).digest == expected
    replace_weights(directory)
    assert load_policy(directory, arch, mesh_of((1, 1, 1))).digest != expected


SAVED = identity(ARCH, "a", **{"model.lora.alpha": 16.0})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (identity(ARCH, "b", **{"model.lora.alpha": 16.0}), ["other weights"]),
        (identity(ARCH, "a", **{"model.lora.alpha": 64.0}), ["model.lora.alpha=64.0 (not 16.0)"]),
        (identity(dataclasses.replace(ARCH, rope_theta=5e5), "a"), ["rope_theta=500000.0 (not 10000.0)"]),
        (identity(dataclasses.replace(ARCH, initializer_range=0.5)), []),
        ({**SAVED, "of a later version": 1}, []),
        ({**SAVED, "pattern": [{**SAVED["pattern"][0], "of a later version": True}]}, []),
        ({**SAVED, "pattern": [{"window": None}]}, []),
        ({**SAVED, "pattern": [{"window": 8}]}, ["pattern=[{'window': 8}] (not " + str(SAVED["pattern"]) + ")"]),
        ({**SAVED, "pattern": 2 * SAVED["pattern"]}, [f"pattern={2 * SAVED['pattern']} (not {SAVED['pattern']})"]),
    ],
)
def test_another_model_is_refused_or_warned_of(found, words, caplog):
    assert differences(SAVED, found) == words and differences({}, found) == []
    for option, own in itertools.product(("model.path", "reference.path"), (True, False)):
        caplog.clear()
        if words and (own or option == "model.path"):
            with pytest.raises(ValueError, match=f"{option} is not the model that DIR was made with: .*: restore"):
                state._check_loaded({option: SAVED}, {option: found}, Origin("DIR", 4), own=own)
        else:
            state._check_loaded({option: SAVED}, {option: found}, Origin("DIR", 4), own=own)
            assert len(caplog.messages) == len(words)


@pytest.mark.slow
def test_a_run_with_adapters_is_bound_to_their_base_and_scale(tmp_path):
    base, one_step = with_tokenizer(MODEL, tmp_path), {"trainer.total_training_steps": 1, "model.lora.rank": 2}
    config = small_config(tmp_path / "run", **changes_of(base, **one_step))
    train(config)
    longer, scaled = {"trainer.total_training_steps": 2}, {"model.lora.alpha": 64.0}
    with pytest.raises(
        ValueError, match=r"model.path is not the model that .*: model.lora.alpha=64.0 \(not 16.0\): res"
    ):
        train(with_values(config, {**longer, **scaled}))
    with pytest.raises(ValueError, match="model.lora.alpha=64.0 contradicts the run"):
        export(with_values(config, scaled), tmp_path / "exported")
    replace_weights(base)
    with pytest.raises(ValueError, match="model.path is not the model that .* was made with: other weights"):
        train(with_values(config, longer))
    for action in (export, bench):
        with pytest.raises(ValueError, match="the run in workdir=.* was trained with, but now there are other weights"):
            path = {} if action is export else {"model.path": str(tmp_path / "run"), "model.lora.rank": 0}
            action(with_values(config, path), tmp_path / "written")
    assert saved(tmp_path / "run") == [1] and not (tmp_path / "written").exists()


@pytest.mark.slow
def test_a_run_is_bound_to_reference_teacher_reward_model_and_architecture(tmp_path):
    base, teacher = with_tokenizer(MODEL, tmp_path), with_tokenizer("qwen3_qknorm", tmp_path)
    reward = str(write_reward_model(tmp_path / "reward"))
    others = {"actor.use_kl_loss": True, "algorithm.distillation.path": teacher, "reward.model.path": reward}
    config = small_config(tmp_path / "run", **changes_of(base, **others, **{"trainer.total_training_steps": 1}))
    train(config)
    longer = with_values(config, {"trainer.total_training_steps": 2})
    models = {"algorithm.distillation.path": teacher, "reference.path": base, "reward.model.path": reward}
    for option, directory in models.items():
        original = (Path(directory) / "model.safetensors").read_bytes()
        replace_weights(directory)
        with pytest.raises(ValueError, match=f"{option} is not the model that .* was made with: other weights"):
            train(longer)
        (Path(directory) / "model.safetensors").write_bytes(original)
    file = Path(base) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.5}))
    with pytest.raises(ValueError, match=r"model.path is not the model .*: rms_norm_eps=0.5 \(not "):
        train(longer)


@pytest.mark.slow
def test_other_held_out_problems_begin_the_best_again(whole, tmp_path):
    run = copied(whole[0], tmp_path, step=4)
    longer = {"trainer.total_training_steps": 5, "trainer.keep_best_ckpt": 1, "trainer.max_ckpt_to_keep": 1}
    train(small_config(run, **longer, **{"evaluate.n": 3, "evaluate.temperature": 0.01}))
    assert "the held-out problems, or how they are sampled and scored, are not those" in (run / "train.log").read_text()
    progress = json.loads((run / "checkpoints" / "5" / "progress" / "metadata").read_text())
    row = read_metrics(run)[-1]
    assert progress["best_step"] == 5 and progress["best"] == progress["alarms"]["best heldout"]
    assert row["alarm/heldout_drop"] == 0 and saved(run) == [5]
