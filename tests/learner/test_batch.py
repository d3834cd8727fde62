"""Every estimator, loss and option of the algorithm in whole runs of a random two-layer model."""

import dataclasses

import jax
import numpy as np
import pytest
from small_run import assert_same_policy, rows_without_clock, small_config

from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.cpo import CPO_METHODS
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.config.sections import TrainerConfig
from dapo_jax.learner.batch import make_batch, policy_statistics
from dapo_jax.learner.learner import update
from dapo_jax.monitor.records import read_metrics
from dapo_jax.rewards.pipeline import RewardPipeline
from dapo_jax.run import networks as run_module
from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.run.parts import open_run
from dapo_jax.run.progress import Progress, kl_coef_of, resumed_coefficient
from dapo_jax.run.sampler import Sampler
from dapo_jax.run.settings import learning_rates
from dapo_jax.training import estimator_inputs as inputs_module
from dapo_jax.training import loop as train_module
from dapo_jax.training.estimator_inputs import estimator_inputs
from dapo_jax.training.loop import train
from dapo_jax.training.state import first_state
from dapo_jax.training.step import sample_batch, train_on

SHORT = {
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.val_before_train": False,
    "trainer.total_training_steps": 3,
}


LOSS = "actor.policy_loss"
TRAINED = {name: {"algorithm.adv_estimator": name} for name in ESTIMATORS}
TRAINED["gdpo"]["algorithm.gdpo_reward_keys"] = ("acc", "score")
TRAINED |= {name: {f"{LOSS}.loss_mode": name, f"{LOSS}.{name}_ratio": 0.1} for name in SELECTIONS}
TRAINED["clip_cov"][f"{LOSS}.clip_cov_lb"] = -9.0


@pytest.mark.slow
@pytest.mark.long("gae", "remax", "cpo", "gdpo", "kl_cov")  # those that need more than rewards
@pytest.mark.parametrize("name", TRAINED)
def test_every_estimator_and_loss_that_draws_tokens_trains_with_finite_changing_losses(tmp_path, name):
    train(small_config(tmp_path, **SHORT, **TRAINED[name]))
    rows = read_metrics(tmp_path)
    losses = [row["actor/pg_loss"] for row in rows]
    assert len(losses) == 3 and np.isfinite(losses).all() and len(set(losses)) == 3
    for row in rows:
        assert row["actor/skipped_updates"] == 0 and row["actor/grad_norm"] > 0 and row["actor/entropy"] > 0
        assert row["rollout_corr/logprob_abs_diff"] < 1e-4
        assert row["critic/advantages/max"] > row["critic/advantages/min"]


@pytest.mark.slow
def test_the_ratio_leaves_one_as_soon_as_there_are_several_mini_batches(tmp_path):
    common = {"trainer.total_training_steps": 1, "actor.optim.lr": 1e-2, "trainer.val_before_train": False}
    train(small_config(tmp_path / "two", **common))
    train(small_config(tmp_path / "one", **common, **{"actor.ppo_mini_batch_size": 4}))
    two, one = (read_metrics(tmp_path / name)[-1] for name in ("two", "one"))
    assert abs(two["actor/ppo_kl"]) > 1e-4 > abs(one["actor/ppo_kl"])
    assert (two["actor/num_updates"], one["actor/num_updates"]) == (2, 1)
    assert two["rollout_corr/first_clipfrac"] == 0


PPO = {
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.horizon": 100.0,
    "algorithm.kl_ctrl.kl_coef": 0.1,
    "algorithm.gamma": 0.99,
    "algorithm.lam": 0.95,
    "trainer.critic_warmup": 1,
    "critic.optim.lr": 1e-3,
    "actor.optim.lr_warmup_steps": 2,
}


@pytest.mark.slow
def test_ppo_with_a_critic_and_an_adaptive_kl_resumes_as_if_not_stopped(tmp_path):
    whole = train(small_config(tmp_path / "whole", **PPO))
    train(small_config(tmp_path / "parts", **PPO, **{"trainer.total_training_steps": 2}))
    resumed = train(small_config(tmp_path / "parts", **PPO))
    assert_same_policy(resumed, jax.device_get(whole.actor.params))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed.critic), jax.device_get(whole.critic))
    rows = rows_without_clock(tmp_path / "whole")
    resumed_rows = rows_without_clock(tmp_path / "parts")
    assert resumed_rows[3:] == rows[3:]
    assert "actor/pg_loss" not in rows[1] and "actor/pg_loss" in rows[2]  # critic_warmup
    assert [row["actor/lr"] for row in rows[2:4]] == pytest.approx([5e-4, 1e-3])  # warm-up starts after the critic's
    assert rows[1]["critic/values/max"] == 0  # a zero head
    assert all(row["critic/vf_loss"] > 0 and row["critic/num_updates"] == 2 for row in rows[1:])
    assert rows[4]["critic/vf_explained_var"] != rows[3]["critic/vf_explained_var"]
    coefficients = [row["actor/reward_kl_penalty_coeff"] for row in rows[1:]]
    assert coefficients[0] == 0.1 and len(set(coefficients)) == 4
    assert abs(rows[1]["actor/reward_kl_penalty"]) < 1e-6 < rows[4]["actor/reward_kl_penalty"]
    for row in rows[3:]:
        assert row["rollout/seq_final_reward/mean"] < row["rollout/seq_reward/mean"]


@pytest.mark.slow
def test_a_coefficient_and_a_best_metric_that_the_config_changes_are_taken_from_it(tmp_path, monkeypatch):
    progress = []
    monkeypatch.setattr(
        train_module, "summary", lambda workdir, trainer, tasks, last, *rest: progress.append(last) or []
    )
    fixed = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1, "trainer.total_training_steps": 1}
    train(small_config(tmp_path, **fixed, **{"trainer.best_metric": "eval/arithmetic/acc/mean@4"}))
    changed = {"algorithm.kl_ctrl.kl_coef": 0.4, "trainer.total_training_steps": 2}
    least = {"trainer.best_metric": "eval/arithmetic/response_length/mean", "trainer.best_metric_mode": "min"}
    train(small_config(tmp_path, **{**fixed, **changed, **least}))
    rows = read_metrics(tmp_path)
    assert [row["actor/reward_kl_penalty_coeff"] for row in rows[1:]] == [0.1, 0.4]
    assert progress[1].kl_coef_of == "fixed 0.4 True"
    assert progress[1].best == rows[2][least["trainer.best_metric"]] and progress[1].best_step == 2


def test_an_adapted_coefficient_is_resumed_unless_the_config_says_another(tmp_path):
    config = small_config(tmp_path, **PPO)
    adapted = Progress(kl_coef=0.3, kl_coef_of=kl_coef_of(config.algorithm))
    other = small_config(tmp_path, **{**PPO, "algorithm.kl_ctrl.kl_coef": 0.4})
    fixed = small_config(tmp_path, **{**PPO, "algorithm.kl_ctrl.type": "fixed"})
    assert [resumed_coefficient(one.algorithm, adapted).kl_coef for one in (config, other, fixed)] == [0.3, 0.4, 0.1]
    before = Progress(kl_coef=0.3)  # of a checkpoint that does not say
    assert [resumed_coefficient(one.algorithm, before).kl_coef for one in (config, other, fixed)] == [0.3, 0.3, 0.1]


@pytest.mark.slow
def test_with_a_critic_alone_a_step_needs_no_rate_of_the_policy(tmp_path):
    changes = {"actor.optim.lr_warmup_steps": 0, "trainer.total_training_steps": 2}
    train(small_config(tmp_path, **{**PPO, **changes}))
    assert ["actor/lr" in row for row in read_metrics(tmp_path)[1:]] == [False, True]


@pytest.mark.slow
def test_the_reference_is_loaded_only_when_a_kl_divergence_is_on(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("loaded")

    monkeypatch.setattr(run_module, "load_reference", refuse)
    once = {"trainer.total_training_steps": 1}
    train(small_config(tmp_path / "without", **once))
    for option in ("actor.use_kl_loss", "algorithm.use_kl_in_reward"):
        with pytest.raises(AssertionError, match="loaded"):
            train(small_config(tmp_path / option, **once, **{option: True}))


@pytest.mark.slow
def test_the_kl_loss_holds_the_policy_near_its_start_and_an_entropy_bonus_keeps_its_entropy_up(tmp_path):
    common = {"actor.use_kl_loss": True, "actor.optim.lr": 1e-2, "trainer.test_freq": -1, "trainer.save_freq": -1}
    rows = []
    for number, (kl, entropy) in enumerate([(1e-9, 0.0), (10.0, 0.0), (1e-9, 1.0)]):
        folder = tmp_path / str(number)
        train(small_config(folder, **common, **{"actor.kl_loss_coef": kl, "actor.entropy_coeff": entropy}))
        rows.append(read_metrics(folder)[-1])
    free, held, bonus = rows
    assert 0 < held["actor/kl_loss"] < 0.5 * free["actor/kl_loss"]
    assert bonus["actor/entropy"] > free["actor/entropy"] + 0.1


@pytest.fixture(scope="module")
def accepted(tmp_path_factory):
    """One step's accepted groups, the models before it and the config, made once."""
    config = small_config(tmp_path_factory.mktemp("accepted"))
    with open_run(config, initial_step=0) as run:
        state = first_state(run)
        weights = run.learner.networks.decode_weights(state.models.actor.params)
        batch, _ = sample_batch(run, weights, state.stream, state.progress, 1)
        return config, batch.experience, jax.device_get(state.models)


def training_batch(run, experience, *, recompute=False):
    models = run.learner.networks.init_models()
    inputs, _ = estimator_inputs(run, experience, models)
    return make_batch(run.learner, experience, models, recompute=recompute, kl_coef=0.0, **inputs)


def batch_with(accepted, experience=None, *, fallen_back=False, **changes):
    """The batch that other options make of the same groups, or of others like them, and its metrics."""
    config = small_config(accepted[0].workdir, **changes)
    with open_run(config, initial_step=0) as run:
        recompute = fallen_back or config.actor.old_logprob == "recompute"
        return training_batch(run, accepted[1] if experience is None else experience, recompute=recompute)


def less_likely(experience):
    """As if the sampler had found the first token of the first response less likely, by a whole one."""
    logprobs = experience.logprobs.copy()
    logprobs[0, 0, 0] -= 1.0
    return dataclasses.replace(experience, logprobs=logprobs)


@pytest.mark.slow
def test_greedy_responses_are_to_the_prompts_of_the_groups_in_whatever_order_a_run_goes_on(accepted, monkeypatch):
    """A checkpoint's groups, in a run that was resumed with another seed."""
    found, sample = [], Sampler.sample
    monkeypatch.setattr(Sampler, "sample", lambda *given: found.append(sample(*given)) or found[-1])
    batch_with(accepted, **{"algorithm.adv_estimator": "remax", "seed": 5})
    np.testing.assert_array_equal(found[0].rows, accepted[1].rows)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "gpg", "remax", "cpo", "gae"])
def test_a_partial_step_has_the_shapes_of_a_full_one_and_padding_changes_nothing(accepted, estimator):
    config, experience, _ = accepted
    changes = {"algorithm.adv_estimator": estimator, "algorithm.overlong_filtering": True}
    if estimator == "grpo":
        changes["algorithm.keep_neg_ratio"] = 0.5
    count, made = experience.finished.shape[1], {}
    with open_run(small_config(config.workdir, **changes)) as run:
        for groups in (4, 3, 1):
            chosen = experience.select(np.arange(groups))
            made[groups], metrics = training_batch(run, chosen, recompute=True)
            assert metrics["actor/overlong_filtered"] == np.mean(~chosen.finished)
            assert metrics.get("actor/kept_samples", 0.5) < 1
        assert run.learner.batching.estimator._cache_size() == 1
    one = {"data.train_batch_size": 1, "actor.ppo_mini_batch_size": 1, "actor.ppo_micro_batch_size_per_device": 2}
    with open_run(small_config(config.workdir, **changes, **one)) as run:
        wanted, _ = training_batch(run, experience.select(np.arange(1)), recompute=True)
    assert jax.tree.map(np.shape, made[1]) == jax.tree.map(np.shape, made[3]) == jax.tree.map(np.shape, made[4])
    for name in ("mask", "loss_mask", "old_logprobs", "advantages"):
        found, expected = getattr(made[1], name), getattr(wanted, name)
        np.testing.assert_allclose(found[:count, : expected.shape[1]], expected, atol=1e-6)
        assert not found[count:].any()


@pytest.mark.slow
@pytest.mark.parametrize("count_empty", [False, True])
def test_sequence_means_of_a_partial_step_divide_by_the_configured_size_if_asked(accepted, count_empty):
    config, experience, _ = accepted
    changes = {"actor.loss_agg_mode": "seq-mean-token-sum", "actor.ppo_mini_batch_size": 4}
    chosen = experience.select(np.arange(3))
    with open_run(small_config(config.workdir, **changes, **{"actor.count_empty_sequences": count_empty})) as run:
        batch, _ = training_batch(run, chosen)
        models = run.learner.networks.init_models()
        rates = learning_rates(run.learner.batching.trained, run.config.trainer, 1)
        metrics, _ = update(run.learner, models, batch, rates)[1]()
    total = -np.sum(batch.advantages, where=batch.mask)  # the ratio is 1
    sequences = (4 if count_empty else 3) * chosen.finished.shape[1]
    assert metrics["actor/pg_loss"] == pytest.approx(total / sequences, rel=1e-3, abs=1e-6)


def test_overlong_filtering_masks_what_was_cut_off(accepted):
    batch, metrics = batch_with(accepted, **{"algorithm.overlong_filtering": True})
    cut = ~accepted[1].finished.reshape(-1)
    assert cut.any() and not cut.all()
    assert not batch.loss_mask[cut].any() and (batch.loss_mask[~cut] == batch.mask[~cut]).all()
    assert metrics["actor/overlong_filtered"] == cut.mean()
    assert (batch.advantages[cut] != 0).any()  # they still count in their group's mean


def test_truncated_responses_are_not_among_the_kept_ones(accepted):
    finished, scores = accepted[1].finished.copy(), accepted[1].scores["seq_reward"]
    finished[:] = True
    finished[np.arange(len(scores)), np.argmin(scores, axis=1)] = False  # which would be the first wrong one to be kept
    experience = dataclasses.replace(accepted[1], finished=finished)
    batch, _ = batch_with(
        accepted, experience, **{"algorithm.keep_neg_ratio": 0.25, "algorithm.overlong_filtering": True}
    )
    trained, wrong = batch.loss_mask.any(axis=1).reshape(scores.shape), (scores == 0).sum(axis=1)
    assert not trained[~finished].any() and (wrong > 1).any()
    assert (trained.sum(axis=1) == (scores == 1).sum(axis=1) + np.ceil((wrong - 1) / 4)).all()


def test_kept_samples_alone_are_trained_on(accepted):
    batch, metrics = batch_with(accepted, **{"algorithm.keep_neg_ratio": 0.25, "algorithm.compute_new_adv": True})
    scores = accepted[1].scores["seq_reward"]
    trained = batch.loss_mask.any(axis=1).reshape(scores.shape)
    assert (trained | (scores < scores.max(axis=1, keepdims=True))).all()  # all good ones
    wrong = (scores == 0).sum(axis=1)
    assert (trained.sum(axis=1) == (scores == 1).sum(axis=1) + np.ceil(wrong / 4)).all()
    assert (batch.advantages[~trained.reshape(-1)] == 0).all()
    assert metrics["critic/advantages_processed/std"] > 0 and metrics["actor/kept_samples"] == trained.mean()
    assert metrics["critic/advantages/max"] != metrics["critic/advantages_processed/max"]


@pytest.mark.slow
def test_samples_are_kept_by_the_reward_after_the_kl_divergence(accepted):
    experience = accepted[1]
    scores = experience.scores["seq_reward"]
    kl = np.zeros(experience.mask.shape, np.float32)
    kl[..., 0] = np.arange(scores.shape[1]) / 100  # later samples of a group are further from the reference
    final = scores - kl.sum(axis=-1)
    penalised = dataclasses.replace(experience.with_scores(seq_final_reward=final), kl=kl)
    batch, _ = batch_with(accepted, penalised, **{"algorithm.keep_neg_ratio": 1e-6})
    for group, trained in zip(final, batch.loss_mask.any(axis=1).reshape(scores.shape), strict=True):
        assert np.flatnonzero(trained & (group < group.mean())).tolist() == [np.argmin(group)]


def test_rollout_correction_weighs_and_rejects(accepted):
    correction = {"rollout_is": "token", "rollout_rs": ("token_k1",), "rollout_rs_threshold": ("2.0",)}
    options = {f"algorithm.rollout_correction.{name}": value for name, value in correction.items()}
    options["actor.old_logprob"] = "recompute"
    batch, metrics = batch_with(accepted, **options)
    np.testing.assert_allclose(batch.importance_weights[batch.mask], 1.0, atol=1e-4)  # one model
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0 and metrics["rollout_corr/k3_kl"] < 1e-8
    batch, metrics = batch_with(accepted, less_likely(accepted[1]), **options)
    assert batch.importance_weights[0, 0] == pytest.approx(2.0) and not batch.loss_mask[0, 0] and batch.mask[0, 0]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / batch.mask.sum())


@pytest.mark.slow
def test_what_an_environment_wrote_rejects_no_response(accepted):
    """It has no log-probability, so it says nothing about the sampler; nor does it carry the reward."""
    experience = accepted[1]
    by_policy = experience.mask & (np.arange(experience.mask.shape[-1]) != 1)
    mixed = dataclasses.replace(experience, by_policy=by_policy, logprobs=np.where(by_policy, experience.logprobs, 0))
    rejection = {"rollout_rs": ("seq_max_k2",), "rollout_rs_threshold": ("0.01",)}
    options = {f"algorithm.rollout_correction.{name}": value for name, value in rejection.items()}
    batch, metrics = batch_with(accepted, mixed, **options, **{"actor.old_logprob": "recompute"})
    np.testing.assert_array_equal(batch.loss_mask, batch.by_policy)
    assert metrics["rollout_corr/k3_kl"] < 1e-8 and (batch.mask & ~batch.by_policy).any()
    plain, _ = batch_with(accepted)
    np.testing.assert_array_equal(batch.advantages, np.where(batch.by_policy, plain.advantages, 0))


@pytest.mark.slow
def test_what_was_sampled_is_kept_for_the_off_policy_mask(accepted):
    shifted, masked = less_likely(accepted[1]), {"actor.off_policy_mask_threshold": 0.1}
    batch, _ = batch_with(accepted, shifted, fallen_back=True, **masked)
    assert batch.sampled_logprobs[0, 0] == shifted.logprobs[0, 0, 0]
    assert batch.old_logprobs[0, 0] - batch.sampled_logprobs[0, 0] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "auto"])
def test_recomputed_logprobs_are_compared_with_the_samplers_not_with_themselves(accepted, mode):
    progress = Progress(recompute_logprobs=mode == "auto")  # fallen back
    with open_run(small_config(accepted[0].workdir, **{"actor.old_logprob": mode})) as run:
        metrics, _ = train_on(run, run.learner.networks.init_models(), less_likely(accepted[1]), progress, 1)[1]()
    tokens = accepted[1].num_tokens
    assert metrics["rollout_corr/logprob_abs_diff_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["rollout_corr/logprob_outliers"] == pytest.approx(1 / tokens)
    assert metrics["rollout_corr/logprob_abs_diff"] == pytest.approx(1 / tokens, rel=1e-2)
    weights = np.ones(tokens)
    weights[0] = np.e
    expected = weights.mean() ** 2 / np.mean(weights**2)
    assert metrics["rollout_corr/eff_sample_size"] == pytest.approx(expected, rel=1e-4)
    assert "rollout_corr/first_clipfrac" not in metrics


@pytest.mark.slow
def test_once_it_has_fallen_back_tokens_are_weighed_up_to_two(accepted):
    config, experience, _ = accepted
    assert config.actor.old_logprob == "auto"
    shifted = less_likely(experience)
    shifted.logprobs[1, 0, 0] += 0.5
    batch, metrics = batch_with(accepted, shifted, fallen_back=True)
    weights = batch.importance_weights.reshape(*experience.finished.shape, -1)[:, 0, 0]
    assert weights[:2] == pytest.approx([2.0, np.exp(-0.5)], rel=1e-3)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)
    assert batch_with(accepted)[0].importance_weights is None


@pytest.mark.slow
@pytest.mark.parametrize("method", CPO_METHODS)
def test_cpo_differs_from_grpo_by_what_the_hint_changes(accepted, method):
    plain, _ = batch_with(accepted)
    options = {"algorithm.adv_estimator": "cpo", "algorithm.cpo.wrap_method": method, "algorithm.cpo.mi_alpha": 1.0}
    batch, _ = batch_with(accepted, **options)
    difference = (batch.advantages - plain.advantages)[batch.mask]
    assert np.isfinite(difference).all() and np.abs(difference).max() > 1e-6
    np.testing.assert_allclose(difference, 0, atol=0.5)


@pytest.mark.slow
def test_a_hint_that_says_nothing_changes_nothing(accepted, monkeypatch):
    """Both log-probabilities of CPO are the training forward pass's."""
    experience = accepted[1]
    monkeypatch.setattr(inputs_module, "hinted_prompts", lambda *_, **__: experience.prompts)
    sampled = dataclasses.replace(experience, logprobs=experience.logprobs - 0.5 * experience.mask)
    batch, _ = batch_with(accepted, sampled, **{"algorithm.adv_estimator": "cpo"})
    np.testing.assert_allclose(batch.advantages, batch_with(accepted)[0].advantages, atol=1e-6)


def test_only_the_tokens_of_highest_entropy_have_advantages(accepted):
    plain, _ = batch_with(accepted)
    with open_run(accepted[0]) as run:
        entropy = policy_statistics(run.learner, accepted[2].actor.params, plain).entropy
    of_rows = entropy.max(axis=1).reshape(accepted[1].finished.shape)
    truncated = dataclasses.replace(accepted[1], finished=of_rows < np.median(of_rows))  # those of highest entropy
    options = {"algorithm.top_entropy_quantile": 0.25, "algorithm.overlong_filtering": True}
    batch, metrics = batch_with(accepted, truncated, **options)
    has = (batch.advantages != 0) & batch.loss_mask
    assert has.sum() == pytest.approx(0.25 * batch.loss_mask.sum(), abs=2)
    np.testing.assert_array_equal(batch.advantages[has], plain.advantages[has])
    assert entropy[has].min() >= metrics["actor/entropy_threshold"] - 1e-6
    assert entropy[batch.loss_mask & ~has].max() <= metrics["actor/entropy_threshold"] + 1e-6


@pytest.mark.slow
def test_gdpo_without_names_takes_the_parts_of_the_reward(accepted):
    """Two parts of which one never differs: the other's advantages, whitened."""
    scores = accepted[1].scores["acc"]
    constant = accepted[1].with_scores(right=scores, same=np.ones_like(scores))
    gdpo = {"algorithm.adv_estimator": "gdpo"}
    parts = '{"right": "arithmetic", "same": {"function": "arithmetic", "weight": 0.5}}'
    batch, _ = batch_with(accepted, constant, **gdpo, **{"reward.functions": parts})
    plain, _ = batch_with(accepted)
    real = plain.advantages[plain.mask]
    np.testing.assert_allclose(batch.advantages[batch.mask], (real - real.mean()) / real.std(ddof=1), atol=1e-4)
    with pytest.raises(ValueError, match="gdpo_reward_keys has nothing, which the verifier does not return"):
        batch_with(accepted, **gdpo, **{"algorithm.gdpo_reward_keys": ("nothing",)})


@pytest.mark.slow
def test_remax_compares_with_the_greedy_response_to_the_same_prompt(accepted, monkeypatch):
    scores, remax = accepted[1].scores["seq_reward"], {"algorithm.adv_estimator": "remax"}

    def baselines():
        return scores - batch_with(accepted, **remax)[0].advantages[:, 0].reshape(scores.shape)

    found, numbers = baselines(), accepted[1].numbers[:, None]
    assert (found == found[:, :1]).all() and np.isin(found, (0.0, 1.0)).all()
    reward = lambda self, groups, prompts: groups.with_scores(seq_reward=groups.numbers[:, None] / 8)  # noqa: E731
    monkeypatch.setattr(RewardPipeline, "shape", reward)
    np.testing.assert_array_equal(baselines(), np.broadcast_to(numbers / 8, scores.shape))


@pytest.mark.slow
def test_a_missing_checkpoint_part_is_not_silently_made_up(tmp_path):
    """A run that gains a critic cannot go on from a checkpoint without one."""
    train(small_config(tmp_path, **{"trainer.total_training_steps": 2}))
    assert Checkpoints(str(tmp_path / "checkpoints"), TrainerConfig()).latest_step() == 2
    with pytest.raises(ValueError, match=r"holds \['actor'\], but the run has \['actor', 'critic'\]"):
        train(small_config(tmp_path, **{"algorithm.adv_estimator": "gae"}))
