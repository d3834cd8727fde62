"""What an environment wrote is in no estimate, loss, reward or statistic of what the policy wrote."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dynamic_sampling.small_groups import MadeUp, accumulated, experience, options_of, start
from shapes import mesh_of
from small_policy import actor_settings, micro_batch, plain_batch
from small_run import small_config

from dapo_jax.algorithms import rollout_correction as correction
from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.aggregation import MODES, token_weights, weighted_sum
from dapo_jax.algorithms.arguments import chosen
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.algorithms.value_loss import clipped_value_loss
from dapo_jax.config.sections import (
    ActorConfig,
    AlgorithmConfig,
    DataConfig,
    DistillationConfig,
    FilterGroupsConfig,
    LengthRewardConfig,
    OverlongBufferConfig,
)
from dapo_jax.data.experience import Collected
from dapo_jax.data.rows import PromptRow
from dapo_jax.data.tokenizer import character_tokenizer
from dapo_jax.dynamic_sampling.rounds import filter_groups
from dapo_jax.learner import batch as batch_module
from dapo_jax.learner.actor import loss_of, loss_options
from dapo_jax.learner.batch import make_batch
from dapo_jax.learner.token_logprobs import TokenStatistics
from dapo_jax.monitor.statistics import length_metrics
from dapo_jax.rewards.scoring import add_rewards
from dapo_jax.run.held_out import _Measured
from dapo_jax.run.parts import open_run
from dapo_jax.training.estimator_inputs import estimator_inputs
from dapo_jax.training.metrics import experience_metrics, sampling_metrics
from dapo_jax.training.sample_texts import step_row
from dapo_jax.training.state import first_state
from dapo_jax.training.step import sample_batch

ROWS, WIDTH, GROUPS = 8, 7, 2
RNG = np.random.default_rng(0)
LENGTHS = np.array([4, 1, 3, 2, 4, 3, 1, 4])
# Each response is its first LENGTHS tokens; as an episode it has observations after some of them.
PLAIN = np.arange(WIDTH) < LENGTHS[:, None]
PLACES = [np.sort(RNG.choice(WIDTH, count, replace=False)) for count in LENGTHS]
BY_POLICY = np.array([np.isin(np.arange(WIDTH), places) for places in PLACES])
IDS = np.repeat(np.arange(GROUPS), ROWS // GROUPS)


def episode(array, fill=np.nan):
    """What an array of responses is for the episodes, with `fill` on observations and padding."""
    found = np.full(np.shape(array), fill, np.asarray(array).dtype)
    found[BY_POLICY] = np.asarray(array)[PLAIN]
    return found


def drawn(seed=1):
    return np.random.default_rng(seed).normal(size=(ROWS, WIDTH)).astype(np.float32)


def assert_same(of_episodes, of_responses):
    np.testing.assert_allclose(
        np.asarray(of_episodes)[BY_POLICY], np.asarray(of_responses)[PLAIN], rtol=1e-5, atol=1e-6
    )


def inputs_of(seed=2):
    """What estimators need besides rewards: arrays [B, R], and the rest."""
    names = ("values", "hint_logprobs", "logprobs", "entropy", "sum_pi_squared", "importance_weights")
    tokens = {name: np.abs(drawn(seed + at)) * 0.5 for at, name in enumerate(names)}
    options = vars(AlgorithmConfig()) | vars(AlgorithmConfig().cpo) | {"gdpo_reward_weights": (1.0, 2.0)}
    rest = {"reward_baselines": drawn()[:, 0], "accuracy": np.float32(LENGTHS > 2), "reward_parts": drawn()[:, :2]}
    return tokens, options | rest | {"num_groups": GROUPS, "vocab_size": 8}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_finds_for_an_episode_what_it_finds_without_observations(name):
    """But for the one that compares tokens at the same position, which only has to ignore what they hold."""
    function, (tokens, rest) = ESTIMATORS[name], inputs_of()
    rewards = drawn(9)
    options = chosen(function, rest)
    tokens = chosen(function, tokens)

    def of_episodes(fill):
        further = {key: episode(values, fill) for key, values in tokens.items()}
        return function(episode(rewards, fill), BY_POLICY, IDS, **options, **further)

    found = of_episodes(np.nan)
    if name == "optimal_token_baseline":
        for one, two in zip(found, of_episodes(7.0), strict=True):
            np.testing.assert_array_equal(one, two)
    else:
        for one, two in zip(found, function(rewards, PLAIN, IDS, **options, **tokens), strict=True):
            assert_same(one, two)
    assert np.isfinite(found[0]).all() and not np.asarray(found[0])[~BY_POLICY].any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_the_response_without_observations(name):
    function, options = LOSSES[name], loss_options(ActorConfig())
    arrays = drawn(3) * 0.3 - 1, drawn(4) * 0.3 - 1, np.broadcast_to(drawn(5)[:, :1], (ROWS, WIDTH))
    weights, noise = np.abs(drawn(6)), np.random.default_rng(7).uniform(size=(ROWS, WIDTH))
    sequences = np.broadcast_to(1 + np.arange(ROWS)[:, None], (ROWS, WIDTH))
    found = []
    for of, mask in ((lambda array: array, PLAIN), (episode, BY_POLICY)):
        given = [of(array) for array in arrays]
        more = {"sequences": sequences, "importance_weights": of(weights), "selected": np.zeros_like(mask)}
        if name in SELECTIONS:
            some = options | {"clip_cov_ratio": 0.3, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0, "kl_cov_ratio": 0.3}
            more["selected"] = SELECTIONS[name](*given, mask, of(noise), **chosen(SELECTIONS[name], some))
        loss, metrics = function(*given, mask, **chosen(function, {**options, **more}))
        totals = [weighted_sum(loss, token_weights(mask, IDS, mode, scale_factor=8.0), mask) for mode in MODES]
        found.append((loss, totals, {key: [mean.total, mean.count] for key, mean in metrics.items()}))
    (plain, totals, metrics), (of_episode, same_totals, same_metrics) = found
    assert_same(of_episode, plain)
    np.testing.assert_allclose(same_totals, totals, rtol=1e-5)
    for key, values in metrics.items():
        np.testing.assert_allclose(same_metrics[key], values, rtol=1e-5, atol=1e-6)


def test_the_critics_loss_and_the_rollout_correction_leave_observations_out():
    values, old, returns, logprobs = (drawn(seed) * 0.3 for seed in range(4))
    arrays = values, old, returns
    loss, clipped = clipped_value_loss(*map(episode, arrays), BY_POLICY, cliprange_value=0.2)
    expected, expected_clipped = clipped_value_loss(*arrays, PLAIN, cliprange_value=0.2)
    assert_same(loss, expected)
    np.testing.assert_allclose(jax.tree.leaves(clipped), jax.tree.leaves(expected_clipped), rtol=1e-5)
    pairs = (episode(values), episode(logprobs), BY_POLICY), (values, logprobs, PLAIN)

    def of_both(function, **options):
        return [function(*map(jnp.asarray, pair), **options) for pair in pairs]

    def assert_equal(found, expected):
        assert {name: float(value) for name, value in found.items()} == pytest.approx(
            {name: float(value) for name, value in expected.items()}, rel=1e-4, abs=1e-6
        )

    for function in (correction.mismatch_metrics, correction.probability_metrics):
        assert_equal(*of_both(function))
    for kind in ("token", "sequence"):
        band = correction.parse_threshold("1.1")
        options = {"rollout_is": kind, "threshold": band, "batch_normalize": True}
        (weights, found), (wanted, expected) = of_both(correction.importance_weights, **options)
        assert_same(weights, wanted)
        assert_equal(found, expected)
    for name in correction.CRITERIA:
        (kept, _), (wanted, _) = of_both(correction.rejection_mask, criteria=((name, correction.Band(None, 1.01)),))
        np.testing.assert_array_equal(np.asarray(kept)[BY_POLICY], np.asarray(wanted)[PLAIN], name)


def test_a_micro_batchs_loss_and_metrics_do_not_depend_on_what_an_observation_was_given():
    mask = BY_POLICY | (np.arange(WIDTH) <= np.where(BY_POLICY, np.arange(WIDTH), -1).max(axis=1)[:, None])
    assert (mask & ~BY_POLICY).any()
    settings = actor_settings(
        kl_loss_coef=0.1,
        entropy_coeff=0.1,
        off_policy_mask_threshold=0.5,
        distillation=DistillationConfig(path="teacher", form="top_k", top_k=2),
    )

    def evaluated(fill):
        def of(seed):
            return np.where(BY_POLICY, drawn(seed) * 0.3 - 1, fill).astype(np.float32)

        candidates = np.stack([of(20), of(21)], axis=-1) - 1
        shares = np.asarray(token_weights(BY_POLICY, IDS, "token-mean"))
        fields = {"old_logprobs": of(10), "ref_logprobs": of(11), "advantages": of(12), "importance_weights": of(13)}
        fields |= {"sampled_logprobs": of(14), "teacher_logprobs": candidates - 0.3, "loss_weights": shares}
        batch = plain_batch(np.ones((GROUPS, 3), bool), mask, loss_mask=BY_POLICY, by_policy=BY_POLICY, **fields)
        found = {"logprobs": of(15), "entropy": of(16), "candidates": candidates}
        piece = micro_batch(batch.replace(values=found["logprobs"], returns=found["entropy"], noise=None))
        of_candidates = micro_batch(batch.replace(teacher_logprobs=candidates)).teacher_logprobs
        statistics = TokenStatistics(piece.values, piece.returns, piece.values, of_candidates)
        return loss_of(statistics, piece, settings)

    (loss, metrics), (same, same_metrics) = evaluated(0.0), evaluated(np.nan)
    assert np.isfinite(loss) and loss == same
    jax.tree.map(np.testing.assert_array_equal, same_metrics, metrics)


TRUTH = PromptRow("1 + 1", "sums", "2", {})


def two_kinds(*, width=12, observed=3):
    """The same groups without and with an observation after the second token of a response that has more."""
    acc, lengths = [[1, 0, 1], [0, 0, 1], [1, 1, 1]], np.array([[2, 4, 6], [3, 3, 2], [1, 5, 6]])
    plain = experience(range(3), acc, lengths=lengths, width=width)
    plain = dataclasses.replace(
        plain,
        logprobs=np.where(plain.mask, -1.0 - np.arange(width), 0).astype(np.float32),
        kl=np.where(plain.mask, 0.1, 0),
    )
    at = np.broadcast_to(np.arange(width), plain.mask.shape)
    given = (at >= 2) & (at < 2 + observed) & (lengths > 2)[..., None]
    mask = at < (lengths + observed * (lengths > 2))[..., None]

    def spread(array, fill):
        found = np.full(array.shape, fill, array.dtype)
        found[mask & ~given] = array[plain.mask]
        return found

    mixed = dataclasses.replace(
        plain, mask=mask, by_policy=mask & ~given, logprobs=spread(plain.logprobs, 0), kl=spread(plain.kl, 0)
    )
    assert mixed.mask.sum() > plain.mask.sum()
    return plain, mixed


def test_lengths_rewards_and_divergences_count_what_the_policy_wrote():
    plain, mixed = two_kinds()
    assert plain.num_tokens == mixed.num_tokens and plain.sequence_kl == pytest.approx(mixed.sequence_kl)
    np.testing.assert_array_equal(plain.outcomes.lengths, mixed.outcomes.lengths)
    mesh, buffer = mesh_of((8, 1, 1)), OverlongBufferConfig(enable=True, len=4, penalty_factor=1.0)
    with jax.set_mesh(mesh):
        for form in ("group", "cosine"):
            shaped = [
                add_rewards(one, buffer, LengthRewardConfig(form=form), max_response_length=6, mesh=mesh)
                for one in (plain, mixed)
            ]
            assert (shaped[0].scores["overlong_reward"] < 0).any()
            for name, values in shaped[0].scores.items():
                np.testing.assert_array_equal(shaped[1].scores[name], values, name)
    for per_token in (1e-6, 0.05, 0.2):
        np.testing.assert_allclose(*(one.divergence(per_token, per_token) for one in shaped), rtol=1e-5)
        np.testing.assert_array_equal(*(one.differs_by_rounding(per_token) for one in shaped))


def test_metrics_histograms_and_texts_count_what_the_policy_wrote():
    class Order:
        epoch = staticmethod(lambda number: 0)

    mesh, found = mesh_of((8, 1, 1)), []
    for one in two_kinds():
        with jax.set_mesh(mesh):
            shaped = add_rewards(one, OverlongBufferConfig(), LengthRewardConfig(), max_response_length=12, mesh=mesh)
            round_ = filter_groups(shaped, FilterGroupsConfig(), mesh)
            accepted = accumulated(MadeUp(lambda _, made=round_: made), start(), **options_of(target=1, size=3))
        metrics = experience_metrics(accepted, DataConfig(), Order()) | sampling_metrics(accepted)
        row = step_row(Collected(shaped, {}, 3, 3), metrics, {}, [TRUTH] * 3, character_tokenizer(), num_samples=4)
        assert all(np.isfinite(list(row["metrics"].values())))
        turns = [sample.pop("turns", []) for sample in row["samples"]]  # which show who wrote what
        assert all(turns) == (one.by_policy is not None)
        found.append(
            (row, _Measured.of(dataclasses.replace(shaped, answers=[]), shaped.scores["score"]).lengths.tolist())
        )
    clipped = length_metrics("response", np.array([2, 3]), 4, np.array([2, 4]))
    assert clipped["response_length/clip_ratio"] == 0.5 and clipped["response_length/max"] == 3
    np.testing.assert_equal(found[1], found[0])


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Sampled groups of which an environment has written the second token, and the config of their run."""
    config = small_config(tmp_path_factory.mktemp("observed"), **{"trainer.val_before_train": False})
    with open_run(config, initial_step=0) as run:
        state = first_state(run)
        weights = run.learner.networks.decode_weights(state.models.actor.params)
        found = sample_batch(run, weights, state.stream, state.progress, 1)[0].experience
    assert found is not None
    by_policy = found.mask & (np.arange(found.mask.shape[-1]) != 1)
    assert (found.mask & ~by_policy).any()
    return config, dataclasses.replace(found, by_policy=by_policy)


READERS = {
    "gae and KL in the reward": {"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": True},
    "cpo": {"algorithm.adv_estimator": "cpo"},
    "optimal_token_baseline": {"algorithm.adv_estimator": "optimal_token_baseline", "actor.use_kl_loss": True},
    "correction": {
        "algorithm.rollout_correction.rollout_is": "sequence",
        "algorithm.rollout_correction.rollout_is_batch_normalize": True,
        "algorithm.rollout_correction.rollout_rs": ("seq_mean_k3", "seq_max_k2"),
        "algorithm.rollout_correction.rollout_rs_threshold": ("0.1", "0.1"),
        "actor.old_logprob": "recompute",
    },
    "entropy and kept samples": {"algorithm.top_entropy_quantile": 0.5, "algorithm.keep_neg_ratio": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_batch_and_its_metrics_do_not_depend_on_what_passes_find_on_observations(groups, name, monkeypatch):
    config, experience_ = groups
    with open_run(small_config(config.workdir, **READERS[name])) as run:
        models, found = run.learner.networks.init_models(), []
        for shift in (0.0, 5.0):
            with monkeypatch.context() as patch:
                for function in ("compute_statistics", "compute_values"):
                    patch.setattr(batch_module, function, shifted(getattr(batch_module, function), shift))
                groups_ = experience_
                if run.config.algorithm.use_kl_in_reward:
                    groups_ = batch_module.penalize_kl(run.learner, groups_, 0.1)
                logprobs = np.where(groups_.policy_mask, groups_.logprobs, -shift)
                groups_ = dataclasses.replace(groups_, logprobs=logprobs.astype(np.float32))
                inputs, _ = estimator_inputs(run, groups_, models)
                recompute = run.config.actor.old_logprob == "recompute"
                found.append(
                    (groups_, *make_batch(run.learner, groups_, models, recompute=recompute, kl_coef=0.1, **inputs))
                )
    (before, batch, metrics), (after, other, other_metrics) = found
    assert other_metrics == metrics
    for field in ("scores", "kl"):
        np.testing.assert_equal(getattr(after, field), getattr(before, field))
    for field in ("loss_mask", "advantages", "by_policy", "loss_weights", "noise"):
        np.testing.assert_equal(getattr(other, field), getattr(batch, field), field)
    for field in ("old_logprobs", "ref_logprobs", "importance_weights", "returns"):
        one, two = (getattr(each, field) for each in (batch, other))
        if one is not None:
            np.testing.assert_array_equal(one[batch.by_policy], two[batch.by_policy], field)


def shifted(function, shift):
    """`function` of batches, which finds numbers higher by `shift` on observations."""

    def found(network, params, batch, *rest):
        given = function(network, params, batch, *rest)
        return jax.tree.map(lambda array: array + shift * (batch.mask & ~batch.policy_mask), given)

    return found
