"""Whole runs of models with experts, and with windows: kills and meshes change nothing."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from preflight.test_programs import ONE_STEP, programs_of, texts_of_a_run
from safetensors.numpy import load_file, save_file
from small_families import changes_of, with_tokenizer
from small_run import DAMPED, assert_same_policy, resumed, small_config

from dapo_jax.monitor.records import read_metrics
from dapo_jax.training.loop import train

ROUTER, BIAS = "model.layers.", ".mlp.gate.e_score_correction_bias"
LENGTHS = {"data.max_prompt_length": 16, "data.max_response_length": 24}  # windows are of 16 tokens
SHORT_RUN = {"trainer.total_training_steps": 3, "trainer.save_freq": 1, "actor.optim.lr": 1e-2}


@pytest.fixture
def model(tmp_path):
    return with_tokenizer("qwen3_moe", tmp_path)


@pytest.mark.slow
def test_partial_rollouts_resume_with_the_experts_that_the_sampler_chose(model, tmp_path, monkeypatch):
    """A run that is killed while responses are begun ends as one that is not, with a teacher that judges them."""
    partial = {
        "rollout.segment_length": 2,
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.leftover": "carry",
        "algorithm.filter_groups.leftover_max_staleness": 3,
        "algorithm.distillation.path": model,  # whose experts the sampler does not choose
        "algorithm.distillation.form": "top_k",
        "algorithm.distillation.top_k": 6,
    }
    changes = changes_of(model, **(SHORT_RUN | partial | {"trainer.total_training_steps": 4}))
    resumed(tmp_path, monkeypatch, changes, killed_in=2)
    rows = [row for row in read_metrics(tmp_path / "a") if "router/max_load" in row]  # of steps with ended groups
    assert len(rows) > 1
    for row in rows:
        assert row["router/max_load"] > 1 > row["router/min_load"] and row["router/aux_loss"] > 0
        assert 0 <= row["router/replay_differs"] < 0.5
    # In the first optimizer step of the run, training would have chosen the same, in float32.
    assert rows[0]["rollout_corr/logprob_abs_diff_max"] < 1e-3


@pytest.mark.slow
@pytest.mark.long("adapters")
@pytest.mark.parametrize(
    "chosen",
    [{}, {"model.lora.rank": 2, "model.lora.target_modules": ("q_proj", "o_proj")}],
    ids=["whole", "adapters"],
)
def test_the_preflight_compiles_what_a_run_of_experts_calls(chosen, model, tmp_path):
    """On eight devices, with a reference, and with the log-probabilities of the training pass."""
    changes = {"actor.old_logprob": "recompute", "actor.use_kl_loss": True, **chosen}
    config = small_config(tmp_path / "run", **changes_of(model, **(ONE_STEP | changes)))
    texts = {program.lower().as_text() for program in programs_of(config).programs}
    assert not [stage for stage, text in texts_of_a_run(config) if text not in texts]
    row = read_metrics(tmp_path / "run")[-1]
    assert row["rollout_corr/logprob_abs_diff_max"] < 1e-3 and row["router/replay_differs"] < 0.1


@pytest.mark.full  # the long lane has experts in segments, above, and slots with adapters, in test_train
@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe"])
def test_a_killed_run_ends_with_the_same_bits(name, tmp_path, monkeypatch):
    model = with_tokenizer(name, tmp_path)
    resumed(tmp_path, monkeypatch, changes_of(model, **LENGTHS, **SHORT_RUN, **{"rollout.decode_chunk_length": 4}))


@pytest.mark.full  # the long lane has rollouts and gradients of each on eight devices, and a run that changes the mesh
@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "glm4_moe", "gpt_oss"])
def test_the_mesh_changes_no_policy(name, tmp_path):
    """Data parallel on eight devices, or 2x2x2 with training divided like sampling: tokens equal, rounding apart."""
    model, found = with_tokenizer(name, tmp_path), {}
    # With seed 0, on some processors, rounding decides a draw or a choice of experts in one of the meshes.
    changes = changes_of(model, **LENGTHS, **DAMPED, **{"seed": 1})
    for data, fsdp, tensor in ((8, 1, 1), (2, 2, 2)):
        mesh = {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.tensor": tensor, "mesh.train_tensor": tensor}
        found[data] = train(small_config(tmp_path / str(data), **changes, **mesh))
    query = found[2].actor.params["layers"]["query"]
    assert query.addressable_shards[0].data.size * 4 == query.size
    if name == "glm4_moe":
        biases = [load_file(f"{model}/model.safetensors")[f"{ROUTER}{layer}{BIAS}"] for layer in (1, 2, 3)]
        np.testing.assert_array_equal(found[2].actor.params["layers"]["router_bias"], biases)
    assert_same_policy(found[8], jax.device_get(found[2].actor.params), tolerance=1e-4)
    alone, divided = (read_metrics(tmp_path / folder) for folder in ("8", "2"))
    assert [row["response_length/mean"] for row in alone] == [row["response_length/mean"] for row in divided]


EXCHANGE = {"mesh.expert": 2, "mesh.fsdp": 4}
LORA = {"model.lora.rank": 2, "model.lora.target_modules": ("q_proj", "o_proj")}
PAIRS = {  # what else a run with exchanged tokens has, and its mesh
    "whole": ({}, EXCHANGE),
    "adapters": (LORA, EXCHANGE),
    "adapters, context": (LORA, EXCHANGE | {"mesh.context": 2}),
    "critic": ({"algorithm.adv_estimator": "gae", "critic.optim.eps": 1e-4}, EXCHANGE),
    "teacher": ({"algorithm.distillation.path": "MODEL", "algorithm.distillation.form": "top_k"}, EXCHANGE),
    "train_tensor": ({}, EXCHANGE | {"mesh.train_tensor": 2}),
}


def keep_experts(model, number):
    """Rewrites a model of qwen3_moe with only its first experts."""
    path = Path(model)
    hf, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if all(f".experts.{i}." not in name for i in range(number, 6))}
    kept |= {name: one[:number] for name, one in kept.items() if name.endswith("mlp.gate.weight")}
    save_file(kept, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(hf | {"num_local_experts": number, "num_experts": number}))


def assert_alike(alone, divided):
    """Two runs of which the second has devices that exchange tokens, at least in its last step."""
    rows, others = read_metrics(alone), read_metrics(divided)
    for key in ("response_length/mean", "critic/score/mean", "router/max_load"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in others], rel=1e-5)
    assert others[-1]["rollout_corr/logprob_abs_diff_max"] < 1e-3 and others[-1]["router/replay_differs"] < 0.1


@pytest.mark.full  # the long lane has the run below
@pytest.mark.parametrize("name", PAIRS)
def test_devices_that_exchange_tokens_train_the_same_policy(name, model, tmp_path):
    """Eight devices with copies of all experts, and those that divide them."""
    (pair, mesh), found = PAIRS[name], {}
    if name == "train_tensor":
        keep_experts(model, 4)  # 2 x 2 divide them
    changes = changes_of(model, **LENGTHS, **DAMPED, **{"seed": 1})
    changes |= {key: model if value == "MODEL" else value for key, value in pair.items()}
    meshes = {"data": {"mesh.data": 8}, "expert": mesh}
    for folder, axes in meshes.items():
        found[folder] = train(small_config(tmp_path / folder, **changes, **axes))
    for network in ("actor", "critic"):
        one, other = (getattr(found[folder], network) for folder in meshes)
        jax.tree.map(
            lambda *leaves: np.testing.assert_allclose(*leaves, rtol=0, atol=1e-4), *jax.device_get((one, other))
        )
    assert_alike(*(tmp_path / folder for folder in meshes))


@pytest.mark.slow
def test_a_run_resumes_with_and_without_devices_that_exchange_tokens(model, tmp_path):
    changes = changes_of(model, **LENGTHS, **DAMPED, **{"seed": 1, "trainer.save_freq": 1})
    for step, mesh in enumerate((EXCHANGE, {"mesh.data": 8}, EXCHANGE), 1):
        last = {"trainer.total_training_steps": step}
        found = train(small_config(tmp_path / "moved", **(changes | mesh | last)))
    expected = train(small_config(tmp_path / "stayed", **(changes | {"mesh.data": 8} | last)))
    gate = found.actor.params["layers"]["expert_gate"]
    assert gate.sharding.spec[1:3] == (("expert", "tensor"), "fsdp")
    assert_same_policy(found, jax.device_get(expected.actor.params), tolerance=1e-4)
    assert_alike(tmp_path / "stayed", tmp_path / "moved")
    moved, stayed = (read_metrics(tmp_path / name) for name in ("moved", "stayed"))
    assert [row["response_length/mean"] for row in moved] == [row["response_length/mean"] for row in stayed]
