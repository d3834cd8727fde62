"""Sampling a batch ahead, on devices of its own: what it is defined to be, its records, and how it goes on."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from reward_model_files import write_reward_model
from small_run import Killed, assert_same_checkpoint, assert_same_policy, rows_without_clock, small_config

from dapo_jax.data.experience import Collected
from dapo_jax.dynamic_sampling.prompt_stream import History, StreamState
from dapo_jax.learner import update
from dapo_jax.monitor.records import read_metrics
from dapo_jax.parallel.mesh import make_mesh, split_devices
from dapo_jax.parallel.sharding import TRAIN_RULES, move, weight_sharding
from dapo_jax.run import meshes
from dapo_jax.run.parts import open_run
from dapo_jax.run.progress import advance
from dapo_jax.run.sampler import Sampler
from dapo_jax.training import loop as train_module
from dapo_jax.training import metrics as metrics_module
from dapo_jax.training import step as step_module
from dapo_jax.training.loop import train
from dapo_jax.training.state import check_sampling, first_state
from dapo_jax.training.step import sample_batch, train_on

STEPS = 4
AHEAD = {
    "trainer.rollout_ahead": 1,
    "trainer.total_training_steps": STEPS,
    "trainer.save_freq": 1,
    "actor.ppo_micro_batch_size_per_device": 16,
    "actor.optim.lr": 1e-2,
}
DIVIDED = {**AHEAD, "trainer.rollout_devices": 4, "mesh.fsdp": 2, "mesh.tensor": 2}


def use_two_devices(monkeypatch):
    """One trains and one samples, which compiles faster."""
    monkeypatch.setattr(meshes, "split_devices", lambda *_: (jax.devices()[:1], jax.devices()[1:2]))


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    """The workdir and the last policy of a run on two devices."""
    folder = tmp_path_factory.mktemp("ahead")
    with pytest.MonkeyPatch.context() as patch:
        use_two_devices(patch)
        models = train(small_config(folder, **AHEAD))
    return folder, jax.device_get(models.actor.params)


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """The same on eight devices."""
    folder = tmp_path_factory.mktemp("divided")
    models = train(small_config(folder, **DIVIDED))
    return folder, jax.device_get(models.actor.params)


def one_after_the_other(config):
    """The same steps without any overlap: the batch of step s by the policy after s - 2 steps, and the metrics."""
    policies, found = [], []
    with open_run(config, initial_step=0) as run:
        state = first_state(run)
        models, progress, stream = state.models, state.progress, state.stream
        policies.append(jax.device_get(models.actor.params))
        for step in range(1, STEPS + 1):
            params = jax.device_put(policies[max(step - 2, 0)], run.learner.networks.actor.trainable.shardings)
            seen = dataclasses.replace(progress, step=max(step - 2, 0))
            batch, stream = sample_batch(run, run.learner.networks.decode_weights(params), stream, seen, step)
            models, finish = train_on(run, models, batch.experience, progress, step)
            metrics = batch.metrics | finish()[0]
            progress, further = advance(config, progress, batch, metrics)
            policies.append(jax.device_get(models.actor.params))
            found.append(metrics | further)
    return policies[-1], found


@pytest.mark.slow
def test_it_is_what_it_is_defined_to_be(tmp_path, divided):
    folder, params = divided
    expected, metrics = one_after_the_other(small_config(tmp_path, **DIVIDED))
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    for row, wanted in zip(read_metrics(folder)[1:], metrics, strict=True):
        assert {name: row[name] for name in wanted} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_the_host_waits_for_no_optimizer_step_before_it_samples(estimator, tmp_path, monkeypatch):
    """Else sampling would overlap with the last one alone: with a critic, too."""
    events, fetch, settle = [], update.fetch, update.settle
    monkeypatch.setattr(update, "fetch", lambda arrays: events.append("w") or fetch(arrays))
    monkeypatch.setattr(update, "settle", lambda arrays: events.append("b") or settle(arrays))
    use_two_devices(monkeypatch)
    changes = {"trainer.total_training_steps": 1, "actor.ppo_epochs": 2, "algorithm.adv_estimator": estimator}
    train(small_config(tmp_path, **{**AHEAD, **changes}))
    # each mini-batch's weights are waited for, then its steps begin; values come before, and results after
    weights, values = (2, "") if estimator == "grpo" else (4, "b+w")
    assert re.fullmatch(rf"{values}w{{{weights}}}b{{8,}}w{{{weights // 2}}}", "".join(events)), events


@pytest.mark.slow
def test_every_batch_but_the_first_is_one_step_old(ahead):
    rows = read_metrics(ahead[0])[1:]
    assert [row["sample/model_version/mean"] for row in rows] == [0, 0, 1, 2]
    for name in ("mean", "max", "min"):
        assert [row[f"sample/staleness/{name}"] for row in rows] == [0, 1, 1, 1]
    # the sampler's log-probabilities are the old ones: after the first step they are another policy's
    assert rows[0]["rollout_corr/logprob_abs_diff"] < 1e-5
    assert all(row["rollout_corr/logprob_abs_diff"] > 1e-4 for row in rows[1:])
    assert not any(row["actor/recomputed_logprobs"] for row in rows)
    mixed = {"time/train_step", "timing_per_token_ms/gen", "timing_per_token_ms/update_actor"}
    assert not any(mixed & set(row) for row in rows), "of sampling the next batch meanwhile"


@pytest.mark.slow
def test_a_run_resumes_with_what_was_sampled_ahead(tmp_path, ahead, monkeypatch):
    use_two_devices(monkeypatch)
    original = train_module.is_due
    for last in (1, 2):

        def stop(step, *rest, last=last):
            if step > last:
                raise Killed
            return original(step, *rest)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(train_module, "is_due", stop)
            train(small_config(tmp_path, **AHEAD))
    models = train(small_config(tmp_path, **AHEAD))
    assert_same_policy(models, ahead[1])
    assert rows_without_clock(tmp_path) == rows_without_clock(ahead[0])
    assert_same_checkpoint(tmp_path, ahead[0])
    held = "4 groups of the checkpoint are trained on with the rewards that they were given"
    assert held in (tmp_path / "train.log").read_text(), "whatever reward function the run has now"


@pytest.mark.slow
def test_the_greedy_baseline_is_sampled_on_the_devices_that_sample(tmp_path, monkeypatch):
    """In the last step nothing is sampled ahead, so the baseline asks for the decoding weights itself.

    A reward model is loaded there too.
    """
    use_two_devices(monkeypatch)
    remax = {"algorithm.adv_estimator": "remax", "trainer.total_training_steps": 2}
    remax |= {"reward.model.path": str(write_reward_model(tmp_path / "reward"))}
    greedy, sampled, meshes = [], [], []

    def counting(counts, function, tokens_of):
        def counted(*arguments):
            found = function(*arguments)
            counts.append(tokens_of(found, *arguments))
            return found

        return counted

    monkeypatch.setattr(Sampler, "sample", counting(greedy, Sampler.sample, lambda found, *_: found.num_tokens))
    of_groups = counting(sampled, step_module.collect, lambda _, accepted, *rest: accepted.sampled.tokens)
    monkeypatch.setattr(step_module, "collect", of_groups)
    of_memory = counting(
        meshes, metrics_module.memory_metrics, lambda _, *of: {device for mesh in of for device in mesh.devices.flat}
    )
    monkeypatch.setattr(metrics_module, "memory_metrics", of_memory)
    train(small_config(tmp_path, **{**AHEAD, **remax, "trainer.test_freq": -1, "trainer.val_before_train": False}))
    rows = read_metrics(tmp_path)
    assert list(map(len, meshes)) == [2, 2], "memory is that of those that train and sample"
    generated = [row["dynamic_sampling/generated_tokens"] for row in rows]
    assert len(rows) == 2 and min(greedy) > 0
    assert generated == np.add(greedy[:2], sampled).tolist()  # then it evaluates


@pytest.mark.slow
@pytest.mark.parametrize(("context", "axes"), [(1, {"fsdp": 4}), (2, {"fsdp": 2, "context": 2})])
def test_training_ahead_may_be_divided_without_tensor(context, axes, tmp_path, divided):
    """The first two batches are of the first policy, so their tokens are equal; then rounding may differ."""
    folder = divided[0]
    changes = {"mesh.train_tensor": 1, "actor.ppo_micro_batch_size_per_device": 8, "trainer.total_training_steps": 2}
    changes["mesh.context"] = context
    models = train(small_config(tmp_path, **{**DIVIDED, **changes}))
    query = models.actor.params["layers"]["query"]
    assert query.sharding.mesh.shape == {"data": 1, **axes, "tensor": 1}
    for step in (1, 2):
        texts = [(run / f"samples/step_{step:06d}.jsonl").read_text() for run in (tmp_path, folder)]
        # step 2 is the last, and evaluated, of only one run
        trained, wanted = ([line for line in text.splitlines() if '"held_out"' not in line] for text in texts)
        assert trained == wanted and trained
    for row, wanted in zip(read_metrics(tmp_path)[1:], read_metrics(folder)[1:3], strict=True):
        assert row["actor/grad_norm"] == pytest.approx(wanted["actor/grad_norm"], rel=1e-4)


def sections(config):
    return config.data, config.rollout, config.algorithm


@pytest.mark.parametrize("size", [2, 8])
def test_a_batch_of_another_size_that_was_sampled_ahead_is_refused(tmp_path, size):
    """A smaller one ended with a shape that cannot be, a larger one trained on fewer groups."""
    ahead = Collected(None, {"dynamic_sampling/target_prompt_num": 4.0}, 4, 4)
    stream = StreamState(0, 1.0, History.empty(1))
    check_sampling(*sections(small_config(tmp_path)), stream, ahead, None)
    with pytest.raises(ValueError, match=f"train_batch_size=4, and the run has {size}: restore that value"):
        check_sampling(*sections(small_config(tmp_path, **{"data.train_batch_size": size})), stream, ahead, None)


def test_training_and_sampling_have_devices_of_their_own():
    training, sampling = split_devices(2, 2)
    assert len(training) == 6 and len(sampling) == 2 and not {*training} & {*sampling}
    assert [len(devices) for devices in split_devices(0, 2)] == [4, 4]
    for devices, tensor in ((8, 1), (3, 2), (1, 2), (9, 1)):
        with pytest.raises(ValueError, match=f"trainer.rollout_devices={devices} must leave"):
            split_devices(devices, tensor)


def test_weights_move_to_other_devices_as_they_are_divided():
    training, sampling = split_devices(4, 2)
    mesh, other = make_mesh(1, 2, 2, training), make_mesh(2, 1, 2, sampling)
    array = np.arange(32.0).reshape(4, 8)
    sharding = weight_sharding(_Matrix, mesh, {**TRAIN_RULES, "embed": None})
    moved = move({"a": jax.device_put(array, sharding)}, other)["a"]
    np.testing.assert_array_equal(moved, array)
    assert moved.sharding.device_set == {*sampling} and moved.addressable_shards[0].data.shape == (4, 4)
    with pytest.raises(ValueError, match="lack some of the weights"):
        move(jax.device_put(array, weight_sharding(_Matrix, mesh, TRAIN_RULES)), make_mesh(4, 1, 1, sampling))


class _Matrix:
    path, shape, axes = ("matrix",), (4, 8), ("embed", "mlp")
