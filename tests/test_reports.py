import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from small_policy import ARCH
from small_run import small_config

from dapo_jax.algorithms.named import named_estimator
from dapo_jax.config.sections import TrainerConfig
from dapo_jax.learner.trained_networks import trained
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.run import progress
from dapo_jax.run.progress import Progress
from dapo_jax.training import metrics as step_metrics
from dapo_jax.training.metrics import forward_flops, memory_metrics, utilisation
from dapo_jax.training.summary import summary

ROW = {
    "perf/forward_tflop": 2.0,
    "perf/total_num_tokens": 1e8,
    "timing_s/update_actor": 3.0,
    "timing_s/old_log_prob": 0.5,
}


def test_operations_of_a_forward_pass():
    D, F, V, L, heads = 48, 80, 64, 2, 4 * 16
    layer = D * heads * 2 + D * 2 * 16 * 2 + 3 * D * F  # query and output, key and value, feed-forward
    for tied in (False, True):  # the head multiplies, the embedding is looked up
        arch = dataclasses.replace(ARCH, tie_embeddings=tied)
        expected = 2 * (L * layer + V * D) * 12 + 2 * L * heads * (5**2 + 7**2)
        assert forward_flops(arch, np.array([[5], [7]])) == expected


def utilised(kind: str, row: dict, *, ahead=False, **changes) -> dict:
    """The utilisation of two training devices of this kind."""
    platform = {"NVIDIA": "gpu", "TPU": "tpu"}.get(kind.split()[0], "cpu")
    device = SimpleNamespace(device_kind=kind, platform=platform, compute_capability="9.0" if platform == "gpu" else "")
    mesh: Any = SimpleNamespace(devices=np.array([device, device]), size=2)
    config = small_config("unused", **changes)
    estimator = named_estimator(config.algorithm.adv_estimator)
    return utilisation(config.model, ARCH, trained(config), mesh, row, estimator=estimator, ahead=ahead)


def test_utilisation_is_of_the_peak_of_all_training_devices():
    actor = [
        utilised("NVIDIA H200", ROW, **changes)["perf/mfu/actor"]
        for changes in ({}, {"actor.ppo_epochs": 2, "model.lora.rank": 4}, {"model.dtype": "float32"})
    ]
    peak = 989e12
    assert actor == pytest.approx([3 * 2e12 / (3 * 2 * peak), 4 * 2e12 / (3 * 2 * peak), 3 * 2e12 / (3 * 2 * 67e12)])
    row = ROW | {"actor/recomputed_logprobs": 1.0, "timing_s/update_critic": 1.0}
    found = utilised("TPU v5 lite", row, **{"algorithm.adv_estimator": "gae"})
    assert found["perf/mfu/actor_infer"] == pytest.approx(2e12 / (0.5 * 2 * 197e12))
    head = 2 * ARCH.vocab_size * ARCH.hidden_size * 1e8  # which a critic has not
    assert found["perf/mfu/critic"] == pytest.approx(3 * (2e12 - head) / (2 * 197e12))
    hinted = utilised("TPU v5 lite", row, **{"algorithm.adv_estimator": "cpo"})
    assert hinted["perf/mfu/actor_infer"] == 2 * found["perf/mfu/actor_infer"], "a pass with the reference solution too"


def test_utilisation_is_left_out_where_peak_or_work_is_unknown():
    assert utilised("NVIDIA H200", ROW).keys() == {"perf/mfu/actor"}
    recomputed = ROW | {"actor/recomputed_logprobs": 1.0}
    assert utilised("NVIDIA H200", recomputed, ahead=True).keys() == {"perf/mfu/actor_infer"}, "updates overlap"
    assert utilised("cpu", ROW) == utilised("NVIDIA H200", {"timing_s/update_actor": 3.0}) == {}


def test_memory_is_what_devices_and_host_tell(monkeypatch):
    mesh = make_mesh(-1, 1, 1)
    assert jax.devices()[0].memory_stats() is None, "a CPU device tells nothing"
    assert set(memory_metrics(mesh)) <= {"perf/cpu_memory_used_gb"}
    devices = [SimpleNamespace(memory_stats=lambda n=n: {"peak_bytes_in_use": n * 2**30}) for n in (1, 3)]
    monkeypatch.setattr(step_metrics, "used_host_bytes", lambda: 2.0**29)
    fake: Any = SimpleNamespace(local_devices=devices)
    assert memory_metrics(fake) == {"perf/max_memory_allocated_gb": 3.0, "perf/cpu_memory_used_gb": 0.5}
    apart: list[Any] = [SimpleNamespace(local_devices=[device]) for device in devices]
    assert memory_metrics(*apart) == memory_metrics(fake), "of devices that train and those that sample"
    monkeypatch.setattr(step_metrics, "used_host_bytes", lambda: None)
    assert "perf/cpu_memory_used_gb" not in memory_metrics(fake)


def test_goodput_is_of_the_steps_that_count_and_restarts_lose_the_time_since_their_checkpoint(monkeypatch):
    monkeypatch.setattr(progress.time, "time", lambda: 200.0)
    first = progress.begun(Progress(), "a", "/a", start=100.0)
    assert progress.goodput(dataclasses.replace(first, step_seconds=40.0)) == {"perf/goodput": 0.4, "time/lost": 0.0}
    saved = dataclasses.replace(first, step_seconds=40.0, saved_at=170.0, lost_seconds=5.0)
    assert progress.goodput(progress.begun(saved, "a", "/b", start=190.0)) == {"perf/goodput": 0.4, "time/lost": 35.0}
    branch = progress.begun(saved, "b", "/b", start=190.0)  # a new run that began as another
    assert progress.goodput(branch) == {"perf/goodput": 0.0, "time/lost": 0.0} and branch.started_at == 190


@pytest.mark.parametrize(("saved", "lost"), [([2, 4], False), ([4], True)])
def test_the_table_says_that_the_best_checkpoint_is_not_on_disk(tmp_path, saved, lost):
    (tmp_path / "metrics.jsonl").write_text("")
    table = dict(summary(str(tmp_path), TrainerConfig(), [], Progress(best=0.5, best_step=2), {}, saved))
    assert str(table.get("checkpoint of the best")).startswith("none: step 2 was not saved or not kept") == lost


@pytest.mark.parametrize(
    ("measured", "before", "after"),
    [({0: 0.2, 2: 0.5, 4: 0.7}, 0.2, 0.7), ({2: 0.5, 4: 0.7}, None, 0.7), ({0: 0.2}, 0.2, None), ({}, None, None)],
)
def test_before_and_after_are_of_the_untrained_and_the_trained_policy(tmp_path, measured, before, after):
    rows = [{"step": step} | ({"eval/a/acc/mean@4": measured[step]} if step in measured else {}) for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = dict(summary(str(tmp_path), TrainerConfig(), [], Progress(), {}, []))
    assert (table["held-out accuracy before"], table["held-out accuracy after"]) == (before, after)


def test_the_table_has_the_training_accuracy_first_and_last_and_how_to_go_on(tmp_path):
    rows = [{"step": 0}, {"step": 1, "rollout/acc/mean": 0.25}, {"step": 2, "rollout/acc/mean": 0.5}, {"step": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = dict(summary(str(tmp_path), TrainerConfig(), [], Progress(step=3), {}, []))
    assert table["training accuracy"] == "0.250 -> 0.500"
    assert str(table["to go on"]).endswith("--config.trainer.total_training_steps=6")
