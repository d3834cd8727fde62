"""What a run begins with: policy, reference and critic; and when it recomputes log-probabilities."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax
import numpy as np
import pytest
from reward_model_files import write_reward_model
from safetensors.numpy import load_file, save_file
from shapes import one_device_mesh
from small_run import small_config

from dapo_jax.data.experience import Collected, Experience
from dapo_jax.learner.actor import build_actor
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.weights import build_freeze
from dapo_jax.monitor.monitor import Monitor
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.parallel.stopping import unpaced
from dapo_jax.run.base_models import load_policy, load_reference, read_model
from dapo_jax.run.networks import build_learner
from dapo_jax.run.progress import Progress, advance, recomputes
from dapo_jax.run.settings import actor_settings

DATA = Path(__file__).parent / "models" / "data"
LLAMA, QWEN2 = str(DATA / "llama_tied"), str(DATA / "qwen2_bias_tied")
POLICY = {"architectures": ["LlamaForCausalLM"]}


def reference_of(**changes):
    """What `load_reference` gives a policy of the architecture at LLAMA."""
    config = small_config("unused", **changes)
    arch = read_architecture(LLAMA)
    load = functools.partial(load_policy, arch=arch, mesh=one_device_mesh())
    return load_reference(config.reference, config.model, arch, load, lambda params: params).params


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_reference_is_the_models_own_start_unless_another_is_named():
    expected = load_policy(LLAMA, read_architecture(LLAMA), one_device_mesh()).params
    assert_equal(reference_of(**{"model.path": LLAMA}), expected)
    assert_equal(reference_of(**{"model.path": "elsewhere", "reference.path": LLAMA}), expected)
    new = load_policy("random", read_architecture(LLAMA), one_device_mesh()).params
    assert_equal(reference_of(**{"model.path": LLAMA, "reference.path": "random"}), new)  # it was the model's own start
    message = f"reference.path={QWEN2} must have the architecture of model.path={LLAMA}"
    with pytest.raises(ValueError, match=re.escape(message)):
        reference_of(**{"model.path": LLAMA, "reference.path": QWEN2})


def test_the_reference_of_a_random_model_is_its_start():
    config, mesh = small_config("unused"), one_device_mesh()
    arch, _ = read_model(config.model)
    with jax.set_mesh(mesh):
        actor = build_actor(actor_settings(config, arch, mesh), mesh)
        load = functools.partial(load_policy, arch=arch, mesh=mesh, seed=config.seed)
        reference = load_reference(config.reference, config.model, arch, load, build_freeze(arch, np.float32, mesh))
        assert_equal(reference.params, actor.trainable.init_random(config.seed).params)


def critic_of(policy, critic_path):
    """The parameters that a run of the policy at `policy` and its critic begin with."""
    changes = {"algorithm.adv_estimator": "gae", "critic.model.path": str(critic_path)}
    config = small_config("unused", **changes, **{"model.path": str(policy)})
    mesh, (arch, tokenizer) = one_device_mesh(), read_model(config.model)
    with jax.set_mesh(mesh):
        learner = build_learner(config, arch, tokenizer, Meshes(mesh, mesh), Monitor.silent(), unpaced)
        models = learner.networks.init_models()
    assert models.critic is not None
    return models.actor.params, models.critic.params


def test_a_critic_begins_with_the_weights_and_the_scalar_head_of_its_own_files(tmp_path):
    policy, other = (write_reward_model(tmp_path / name, **POLICY) for name in ("policy", "other"))
    tensors = {name: 2 * values for name, values in load_file(other / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors")
    params, begun = critic_of(policy, "")
    same_params, twice = critic_of(policy, other)
    assert_equal(params, same_params)
    assert_equal(twice["layers"], jax.tree.map(lambda x: 2 * x, begun["layers"]))
    assert not np.any(begun["score"]) and not np.any(twice["score"])
    scored = write_reward_model(tmp_path / "scored", initializer_range=0.5)
    head = load_file(scored / "model.safetensors")["score.weight"]
    np.testing.assert_array_equal(critic_of(policy, scored)[1]["score"], head[0])


def test_a_critic_of_another_architecture_or_of_a_run_is_refused(tmp_path):
    policy = write_reward_model(tmp_path / "policy", **POLICY)
    wider = write_reward_model(tmp_path / "wider", intermediate_size=96)
    message = "critic.model.path=.*wider must have the architecture of model.path, except for"
    with pytest.raises(ValueError, match=message):
        critic_of(policy, wider)
    run = tmp_path / "run"
    (run / "checkpoints" / "3").mkdir(parents=True)
    (run / "checkpoints" / "3" / "_CHECKPOINT_METADATA").write_text("{}")
    (run / "config.json").write_text(json.dumps(dataclasses.asdict(small_config(run))))
    with pytest.raises(ValueError, match="critic.model.path=.*run is a run: give a model's files"):
        critic_of(policy, run)


def test_a_policy_is_a_language_model(tmp_path):
    config = small_config("unused", **{"model.path": str(tmp_path)})
    write_reward_model(tmp_path)
    message = f"model.path={tmp_path} is a sequence-classification model: give a language model"
    with pytest.raises(ValueError, match=re.escape(message)):
        read_model(config.model)
    write_reward_model(tmp_path, **POLICY)
    assert not read_model(config.model)[0].scalar_head


@pytest.mark.parametrize(("leftover", "falls_back"), [("requeue", True), ("carry", False)])
def test_a_mismatch_makes_auto_recompute_unless_groups_are_carried(tmp_path, leftover, falls_back):
    config = small_config(tmp_path, **{"algorithm.filter_groups.leftover": leftover})
    accepted = Collected(None, {}, num_kept=0, num_evaluated=0)
    metrics = {"dynamic_sampling/generated_tokens": 5, "dynamic_sampling/trained_tokens": 3, "rollout_corr/k3_kl": 0.1}
    progress, _ = advance(config, Progress(), accepted, metrics)
    assert recomputes(config, progress) == falls_back and progress.step == 1
    assert recomputes(config, Progress(recompute_logprobs=True)) == falls_back, "as before the groups were carried"
    for versions, same in ([2, 2], True), ([1, 2], False):  # the latter was sampled before a resume with other options
        groups = cast(Experience, SimpleNamespace(versions=np.array(versions)))
        resumed, _ = advance(config, Progress(step=2), dataclasses.replace(accepted, experience=groups), metrics)
        assert recomputes(config, resumed) == (falls_back and same)
    small, _ = advance(config, Progress(), accepted, {**metrics, "rollout_corr/k3_kl": 1e-5})
    assert not recomputes(config, small)
    cured = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float32"))
    assert not recomputes(cured, progress)
