"""Runs that name their model alone."""

from typing import Any

import jax
import numpy as np
import pytest
from small_families import with_tokenizer

import dapo_jax as dx
from dapo_jax.config.values import flat, freeze, with_values
from dapo_jax.interface import sizes
from dapo_jax.interface.rows import with_rows
from dapo_jax.monitor.recipe import read_config

ROWS = [{"q": f"{number} + 1 =", "a": number + 1} for number in range(8)]
COLUMNS = {"data.prompt_template": "{q}", "data.answer_key": "a", "reward.function": "arithmetic"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", True),
        ("Qwen/Qwen2.5-0.5B-Instruct@main", True),
        ("~/models/any.gguf", True),
        ("gs://bucket/model", True),
        (".", True),
        ("tiny", False),
        ("configs/tiny.py", False),
        ("runs/mine/config.json", False),
    ],
)
def test_models_are_told_from_recipes_and_files(name, expected):
    assert sizes.names_model(name) == expected


@pytest.fixture
def of_model(tmp_path, monkeypatch):
    values = sizes.config_of_model(with_tokenizer("llama_tied", tmp_path))
    values.update_from_flattened_dict({**COLUMNS, "workdir": str(tmp_path / "run")})
    monkeypatch.setattr(sizes, "context_length", lambda path: 128)
    return with_rows(freeze(values), ROWS, None)


def chosen(config, **given):
    given = {name.replace("__", "."): value for name, value in given.items()}
    values = flat(sizes.with_sizes(with_values(config, given), given))
    return {key: values[key] for key in sizes.SIZES}


def test_sizes_fit_devices_data_context_and_memory(of_model, monkeypatch, capsys):
    found = chosen(of_model)
    assert capsys.readouterr().out.startswith("sizes for 8 x cpu, of which any can be given: mesh.fsdp=8 rollout.n=8 ")
    assert found["mesh.fsdp"] == jax.device_count() and found["data.train_batch_size"] == 16
    assert found["actor.ppo_mini_batch_size"] == 4 and found["actor.ppo_micro_batch_size_per_device"] == 4
    assert found["data.max_prompt_length"] == 8 and not found["data.filter_overlong_prompts"]  # of 7 characters
    assert found["data.max_response_length"] == 128 - 8  # of the model's positions
    monkeypatch.setattr(sizes, "free_bytes", lambda mesh: 1e6)
    assert chosen(of_model)["actor.ppo_micro_batch_size_per_device"] == 1


def test_given_sizes_stay_and_the_others_follow_them(of_model, monkeypatch):
    given = {"rollout__n": 4, "mesh__tensor": 2, "data__train_batch_size": 6, "data__max_prompt_length": 20}
    found = chosen(of_model, **given)
    assert found["mesh.fsdp"] == 4 and found["rollout.n"] == 4 and found["data.train_batch_size"] == 6
    assert found["actor.ppo_mini_batch_size"] == 6 and found["data.max_response_length"] == 128 - 20
    monkeypatch.setattr(sizes, "LONGEST_PROMPT", 5)
    found = chosen(of_model)
    assert found["data.max_prompt_length"] == 5 and found["data.filter_overlong_prompts"]


@pytest.mark.slow
def test_a_model_is_trained_and_resumed_with_its_sizes(tmp_path, monkeypatch):
    model, rates = (
        with_tokenizer("llama_tied", tmp_path),
        {"actor.optim.lr": 1e-3, "algorithm.filter_groups.enable": False},
    )
    small = {"data.max_response_length": 4, "trainer.val_before_train": False, **COLUMNS, **rates}

    def run(steps):
        options = {**small, "trainer.total_training_steps": steps}
        return dx.train(model, data=ROWS, workdir=str(tmp_path / "run"), **options)

    assert len(run(1).records) == 1
    before = read_config(tmp_path / "run")
    monkeypatch.setattr(sizes, "free_bytes", lambda mesh: 1.0)  # another machine
    records = run(2).records
    assert [row["step"] for row in records] == [1, 2] and np.isfinite(records[1]["actor/grad_norm"])
    assert read_config(tmp_path / "run") == with_values(before, {"trainer.total_training_steps": 2})


def test_options_change_configs_of_any_form(tmp_path):
    rate: dict[str, Any] = {"lr": 3}
    for config in ("tiny", dx.load_config("tiny"), freeze(dx.load_config("tiny"))):
        with pytest.raises(dx.InputError, match=r"train: there is no option lr: write actor.optim.lr=3"):
            dx.train(config, **rate)
    wrong: dict[str, Any] = {"rollout.n": 0}
    with pytest.raises(dx.InputError, match="rollout.n=0 must be greater than 0"):
        dx.train("tiny", workdir=str(tmp_path), **wrong)
