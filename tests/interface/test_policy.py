"""A policy for loops of one's own."""

import dataclasses

import numpy as np
import pytest
from small_run import RECIPE

import dapo_jax as dx
from dapo_jax.config.sections import CriticConfig
from dapo_jax.config.values import freeze
from dapo_jax.interface.samples import comparing_groups
from dapo_jax.learner.trained_networks import trained
from dapo_jax.parallel.stopping import Pace

CHANGES = {
    "data.train_batch_size": 4,
    "actor.ppo_mini_batch_size": 2,
    "rollout.n": 4,
    "actor.optim.lr": 1e-2,
    "actor.ppo_micro_batch_size_per_device": 4,
}
COSINE = {"actor.optim.lr_scheduler_type": "cosine"}
SUMS = ["1 + 2 =", "3 + 4 ="]


@pytest.fixture(scope="module")
def config():
    return dx.load_config(str(RECIPE), CHANGES)


@pytest.fixture(scope="module")
def policy(config):
    with dx.Policy(config) as policy:
        yield policy


def learn(policy):
    """The last of four batches, its rewards and the metrics of the step."""
    for _ in range(4):
        samples = policy.generate(SUMS)
        rewards = samples.tokens[..., 0] % 2
        metrics = policy.step(samples, rewards)
    return samples, rewards, metrics


@pytest.fixture(scope="module")
def learnt(config):
    with dx.Policy(config) as policy:
        yield policy, *learn(policy)


def test_the_host_does_not_run_far_ahead_of_an_update(policy):
    assert isinstance(policy._learner.pace, Pace)


def test_sampled_logprobs_are_those_of_the_training_pass(policy):
    samples = policy.generate(SUMS)
    assert samples.tokens.shape == samples.mask.shape == samples.logprobs.shape == (2, 4, 4)
    assert [len(texts) for texts in samples.texts] == [4, 4] and samples.mask.any(axis=-1).all()
    np.testing.assert_allclose(policy.logprobs(samples), samples.logprobs, atol=1e-4)
    assert len(samples.select([True, False])) == 1 and samples.select([1]).prompts == SUMS[1:]


@pytest.mark.slow
def test_number_length_and_temperature_can_be_other_than_in_the_config(policy):
    samples = policy.generate(SUMS, n=3)
    assert samples.tokens.shape == (2, 3, 4) and [len(texts) for texts in samples.texts] == [3, 3]
    np.testing.assert_allclose(policy.logprobs(samples), samples.logprobs, atol=1e-4)
    short = policy.generate(["1 + 2 ="], max_tokens=1)
    assert (short.mask.sum(axis=-1) == 1).all()
    greedy = policy.generate(["1 + 2 ="], n=2, temperature=0.0)
    assert greedy.texts[0][0] == greedy.texts[0][1]


def test_rewarded_responses_become_likelier_and_a_program_repeats_itself(config, learnt):
    policy, samples, rewards, metrics = learnt
    after, mixed = policy.logprobs(samples), dx.keep_groups(rewards)
    assert policy.steps == 4 and np.isfinite(metrics["actor/pg_loss"])
    gained = (after - samples.logprobs)[..., 0]
    assert mixed.any() and gained[mixed][rewards[mixed] == 1].mean() > gained[mixed][rewards[mixed] == 0].mean()
    with dx.Policy(config) as again:
        np.testing.assert_array_equal(learn(again)[0].tokens, samples.tokens)
        np.testing.assert_array_equal(again.logprobs(samples)[..., 0], after[..., 0])


def test_an_exported_policy_is_the_same_policy(learnt, tmp_path):
    policy, samples, *_ = learnt
    policy.export(tmp_path / "model", dtype="float32")
    with pytest.raises(dx.InputError, match="model.lora.rank=0"):
        policy.export(tmp_path / "other", adapter=True)
    with dx.Policy(dx.load_config(str(RECIPE), CHANGES | {"model.path": str(tmp_path / "model")})) as exported:
        np.testing.assert_allclose(exported.logprobs(samples), policy.logprobs(samples), atol=1e-6)


def test_what_does_not_fit_is_refused(policy):
    samples = policy.generate(SUMS)
    for given, rewards, message in (
        (samples, np.zeros((2, 3)), "give one per response"),
        (samples, np.full((2, 4), np.nan), "not finite"),
        (policy.generate(SUMS, n=2), np.zeros((2, 2)), "do not fit data.train_batch_size=4 and rollout.n=4"),
        (samples.select([0, 1, 0, 1, 0]), np.zeros((5, 4)), "do not fit data.train_batch_size=4"),
        (policy.generate(SUMS, temperature=0.5).select([1]), np.zeros((1, 4)), "drawn at temperature=0.5, but .*=1:"),
    ):
        with pytest.raises(dx.InputError, match=message):
            policy.step(given, rewards)
    with pytest.raises(dx.InputError, match="step takes the samples of generate, not list"):
        policy.step(["3"], np.ones((1, 4)))
    with pytest.raises(dx.InputError, match="there is no group 7 among 2: choose from 0 to 1"):
        samples.select([0, 7])
    values = np.ones((2, 4))
    for arguments, message in (
        ({}, "give one of the two"),
        ({"rewards": values, "advantages": values}, "give one of the two"),
        ({"rewards": values, "groups": [0, 1]}, r"groups have the shape \(2,\), but the samples \(2, 4\)"),
        ({"advantages": values[:, :3]}, r"advantages have the shape \(2, 3\): it must be \(2, 4\) or \(2, 4, 4\)"),
        ({"advantages": np.full((2, 4), np.nan)}, "not finite"),
    ):
        with pytest.raises(dx.InputError, match=message):
            policy.step(samples, **arguments)
    for changes, message in (
        ({"actor.loss_agg_mode": "group-token-mean"}, "groups do not go with actor.loss_agg_mode=group-token-mean"),
        ({"algorithm.adv_estimator": "reinforce_plus_plus"}, "do not go with adv_estimator=reinforce_plus_plus, which"),
    ):
        config = freeze(dx.load_config(str(RECIPE), changes))
        batching = dataclasses.replace(policy._learner.batching, algorithm=config.algorithm, trained=trained(config))
        with pytest.raises(dx.InputError, match=message):
            comparing_groups(batching, (2, 4), np.zeros((2, 4)))
    assert policy.logprobs(samples.select([])).shape == (0, 4, 4)
    with pytest.raises(dx.InputError, match="drawn at temperature=0.5, but log-probabilities are those at"):
        policy.logprobs(policy.generate(SUMS[:1], temperature=0.5))
    policy.logprobs(policy.generate(SUMS[:1], temperature=0.0))
    for arguments in ({"n": 0}, {"max_tokens": 0}, {"max_tokens": 5}, {"temperature": -1.0}):
        with pytest.raises(dx.InputError, match="at least"):
            policy.generate(["1 + 2 ="], **arguments)
    for prompts in ("1 + 2 =", [], [{"role": "user", "content": "1 + 2 ="}], [1], [None], 1, [[]], [["user"]]):
        with pytest.raises(dx.InputError, match="a list of texts"):
            policy.generate(prompts)
    for rows in (1, [1], [{}, {}]):
        with pytest.raises(dx.InputError, match="dicts of columns, which must be one for each of 1 prompts"):
            policy.generate(SUMS[:1], rows=rows, tools=[print])
    for prompt in ("", "1" * 40):
        with pytest.raises(dx.InputError, match="from 1 to data.max_prompt_length=16"):
            policy.generate([prompt])
    assert policy.step(samples.select([]), np.zeros((0, 4))) == {} and policy.steps == 0
    for changes, message in (
        ({"algorithm.adv_estimator": "remax"}, "Policy does not support algorithm.adv_estimator=remax"),
        ({"actor.ppo_mini_batch_size": 3}, "multiple of"),
        (
            {**COSINE, "trainer.total_training_steps": -1, "trainer.total_epochs": 2},
            "Policy does not support actor.optim.lr_scheduler_type=cosine over total_training_steps=-1",
        ),
    ):
        with pytest.raises(dx.InputError, match=message):
            dx.Policy(dx.load_config(str(RECIPE), CHANGES | changes))


def test_groups_and_advantages_may_be_given(config):
    """Those of the prompts, in any order of names, and the advantages that they lead to change nothing."""
    found = []
    for values in (
        lambda rewards: {"rewards": rewards},
        lambda rewards: {"rewards": rewards, "groups": np.repeat([["b"], ["a"]], 4, axis=1)},
        lambda rewards: {"advantages": dx.group_advantages(rewards)},
        lambda rewards: {"advantages": np.repeat(dx.group_advantages(rewards)[..., None], 4, axis=-1)},
        lambda rewards: {"rewards": rewards, "groups": np.arange(8).reshape(2, 4) % 2},
    ):
        with dx.Policy(config) as policy:
            samples = policy.generate(SUMS)
            policy.step(samples, **values(np.array([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])))
            found.append(policy.logprobs(samples))
    with pytest.raises(dx.InputError, match="the policy has been closed"):
        policy.generate(SUMS)
    for same in found[1:4]:
        np.testing.assert_allclose(same, found[0], atol=1e-5)
    assert np.abs(found[4] - found[0]).max() > 1e-3  # other groups


@pytest.mark.slow
def test_the_training_pass_is_compared_with_the_sampler_not_with_itself():
    with dx.Policy(dx.load_config(str(RECIPE), CHANGES | {"actor.old_logprob": "recompute"})) as policy:
        samples, rewards = policy.generate(SUMS), np.arange(8).reshape(2, 4) % 2
        first, second = (policy.step(samples, rewards, learning_rate=1e-2) for _ in range(2))
    assert first["rollout_corr/logprob_abs_diff_max"] < 1e-3 < 1e-2 < second["rollout_corr/logprob_abs_diff_max"]
    assert "rollout_corr/first_clipfrac" not in second


def test_a_schedule_that_has_ended_is_refused():
    changes = {"trainer.total_training_steps": 2, "algorithm.adv_estimator": "gae"}
    with dx.Policy(dx.load_config(str(RECIPE), CHANGES | COSINE | changes)) as policy:
        samples, rewards = policy.generate(SUMS), np.arange(8).reshape(2, 4) % 2
        assert [policy.step(samples, rewards)["actor/lr"] > 0 for _ in range(2)] == [True, True]
        with pytest.raises(dx.InputError, match="step 3 has a learning rate of 0, .*total_training_steps=2: raise it"):
            policy.step(samples, rewards)
        assert policy.steps == 2
        found, critic = policy.step(samples, rewards, learning_rate=1e-3), CriticConfig().optim.lr
        assert found["actor/lr"] == 1e-3 and found["critic/lr"] == pytest.approx(critic)


@pytest.mark.slow
def test_a_teacher_alone_may_train_a_policy():
    """Without the filter, which such a run may not have."""
    teacher = {"algorithm.distillation.path": "random", "algorithm.distillation.use_task_rewards": False}
    changes = CHANGES | teacher | {"algorithm.filter_groups.enable": False}
    with dx.Policy(dx.load_config(str(RECIPE), changes)) as policy:
        metrics = policy.step(policy.generate(SUMS), np.zeros((2, 4)))
    assert metrics["actor/grad_norm"] > 0


def test_configs_come_from_recipes_files_and_changes(tmp_path):
    config = dx.load_config("tiny", {"model.path": "elsewhere"})
    assert config.model.random.initializer_range == 0.02  # the recipe's belongs to its random model
    with pytest.raises(dx.InputError, match="did you mean actor.grad_clip"):
        dx.load_config("tiny", {"actor.grad_clp": 1})
    with pytest.raises(dx.InputError, match="correct the changes"):
        dx.load_config("tiny", {"rollout.n": "many"})
    with pytest.raises(dx.InputError, match="did you mean tiny?"):
        dx.load_config("tinny")
    with pytest.raises(dx.InputError, match="model.path is empty"):
        dx.train(dx.default_config())
