"""Whole runs of models with windows and with experts: kills and meshes change nothing."""

import jax
import pytest
from small_families import changes_of, with_tokenizer
from small_run import DAMPED, assert_same_policy, resumed, small_config

from dapo_jax.monitor.records import read_metrics
from dapo_jax.training import train

LENGTHS = {"data.max_prompt_length": 16, "data.max_response_length": 24}  # windows are of 16 tokens
LEARNS = {"actor.optim.lr": 1e-2}
# With seed 0, on some processors, rounding decides a draw or a choice of experts in one of the meshes.
CLEAR = {"seed": 1}
MODELS = ("gemma3", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chosen"),
    [("gemma3", {"rollout.engine": "slots", "rollout.decode_chunk_length": 4}), ("qwen3_moe", {})],
    ids=["gemma3-slots", "qwen3_moe-waves"],
)
def test_a_killed_run_ends_with_the_same_bits(name, chosen, tmp_path, monkeypatch):
    model = with_tokenizer(name, tmp_path)
    more = {"trainer.total_training_steps": 3, "trainer.save_freq": 1}
    changes = changes_of(model, **LENGTHS, **LEARNS, **more, **chosen)
    resumed(tmp_path, monkeypatch, changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_mesh_changes_no_policy(name, tmp_path):
    """Data parallel on eight devices, or 2x2x2 with training divided like sampling: tokens equal, rounding apart."""
    model, found = with_tokenizer(name, tmp_path), {}
    for data, fsdp, tensor in ((8, 1, 1), (2, 2, 2)):
        mesh = {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.tensor": tensor, "mesh.train_tensor": tensor}
        found[data] = train(
            small_config(tmp_path / str(data), **changes_of(model, **LENGTHS, **CLEAR, **DAMPED, **mesh))
        )
    assert_same_policy(found[8], jax.device_get(found[2].actor.params), tolerance=1e-4)
    alone, divided = (read_metrics(tmp_path / folder) for folder in ("8", "2"))
    assert [row["response_length/mean"] for row in alone] == [row["response_length/mean"] for row in divided]
