"""Host: computes again what follows sampling in a step, from the batch that the run has kept of it: without weights."""

from collections.abc import Mapping
from dataclasses import replace

import jax
import numpy as np

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.config.sections import Config, FilterGroupsConfig
from dapo_jax.config.values import with_values
from dapo_jax.data.containers import Batch, Rollout
from dapo_jax.data.experience import OWN_SCORES, SCORE, Experience, from_arrays
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.dynamic_sampling.rounds import filter_groups
from dapo_jax.errors import InputError
from dapo_jax.learner.batch import estimate_advantages, token_rewards, verdicts_of_rows
from dapo_jax.learner.learner import Batching
from dapo_jax.learner.rows import rows_of, without_unknown
from dapo_jax.learner.trained_networks import FOR_ESTIMATORS
from dapo_jax.monitor import statistics
from dapo_jax.monitor.kept_batches import GROUPS, read_batch
from dapo_jax.rewards.pipeline import RewardPipeline
from dapo_jax.run.base_models import read_policy
from dapo_jax.run.episodes import open_environments
from dapo_jax.run.meshes import make_meshes
from dapo_jax.run.networks import build_batching
from dapo_jax.run.parts import open_monitor, open_rewards, read_episodes
from dapo_jax.run.passes import passes
from dapo_jax.run.sampler import scores_of
from dapo_jax.tools.replay_comparison import Replay
from dapo_jax.tools.replay_group import group_table, groups_by_number
from dapo_jax.tools.replay_plan import Plan

OTHER_WEIGHTS = ("reference.path", "critic.model.path", "algorithm.distillation.path")  # are not needed
OF_WEIGHTS = (*FOR_ESTIMATORS, "hint_logprobs", "reward_baselines")  # what estimators may need that no batch has
UNFILTERED = {"fallback_unfiltered", "train_unfiltered"}
Arrays = Mapping[str, np.ndarray]


def from_kept_batch(plan: Plan, config: Config, group: int | None) -> Replay:
    """Computes verdicts, rewards, kept groups and advantages of the batch of `plan`, and compares each.

    Args:
        config: the run's, with its work directory elsewhere.
        group: whose table is wanted, from 1.

    Raises:
        InputError: the data or the verifiers do not fit the batch.
    """
    has_teacher = bool(config.algorithm.distillation.path)
    config = with_values(config, dict.fromkeys(OTHER_WEIGHTS, ""))
    kept, row, found = read_batch(plan.run, plan.step), plan.rows[plan.step], Replay(plan.tolerance)
    assert kept is not None
    found.begin(plan.step)
    found.not_compared = ["sampling, log-probabilities, loss, gradients, weights: they need the policy's weights"]
    arch, tokenizer = read_policy(config)
    with open_environments(config, tokenizer) as environments:
        config, problems = read_episodes(config, tokenizer, environments)
        mesh, rollout_mesh = make_meshes(config, arch)
        with (
            jax.set_mesh(rollout_mesh),
            open_monitor(config, initial_step=plan.step) as monitor,
            open_rewards(config, problems, tokenizer, rollout_mesh, monitor) as rewards,
        ):
            recorded = groups_in(kept, problems.train_set, tokenizer, plan)
            if environments is None:
                judged = verify_again(found, recorded, rewards, problems.train_set, row)
            else:
                given = {name: values for name, values in recorded.scores.items() if name not in OWN_SCORES}
                judged = replace(recorded, scores=given)
                found.not_compared.append("verdicts: the environment gives them in its turns")
            shaped = reward_again(found, recorded, rewards.shape(judged, problems.train_set))
            filter_again(found, shaped, config.algorithm.filter_groups, rollout_mesh)
        kl_coef = row.get("actor/reward_kl_penalty_coeff") or 0.0
        with jax.set_mesh(mesh):
            batching = build_batching(config, arch, passes(config, arch, mesh), mesh, pad_id=tokenizer.pad_id)
            batch = advantages_again(found, shaped, batching, kept, kl_coef, has_teacher=has_teacher)
        if "advantages" in found.counts:
            compare_metrics(found, row, batch)
    groups = groups_by_number([(shaped, [True] * len(shaped))], tokenizer.decode)
    found.samples(plan.run, groups)
    if group is not None:
        metric, rows = config.algorithm.filter_groups.metric, problems.train_set.rows
        found.table = group_table(groups, group, shaped.numbers.tolist(), batch, metric, rows)
    return found


def groups_in(kept: Arrays, prompts: PromptSet, tokenizer: Tokenizer, plan: Plan) -> Experience:
    """The groups of a kept batch, with their prompts from the data as it is now."""
    groups = {name.removeprefix(GROUPS): array for name, array in kept.items() if name.startswith(GROUPS)}
    if (last := int(groups["rows"].max(initial=-1))) >= len(prompts):
        raise InputError(
            f"the batch of step {plan.step} has row {last} of the training problems, which are {len(prompts)} now: "
            "name the file with which the run was computed, data.train_files=FILE"
        )
    return from_arrays(groups, prompts, tokenizer)


def verify_again(
    found: Replay, recorded: Experience, rewards: RewardPipeline, prompts: PromptSet, row: Mapping[str, float]
) -> Experience:
    """The groups with the verdicts of today. Numbers of a failed verification depend on earlier steps: they stay.

    Args:
        row: the step's metrics, which count the verifications that failed, but not those of carried groups.
    """
    shape = recorded.finished.shape
    rows = (array.reshape(-1, array.shape[-1]) for array in (recorded.responses, recorded.mask, recorded.logprobs))
    verification = rewards.verify(prompts, recorded.rows.tolist(), shape[1])
    verification.begin(np.arange(recorded.finished.size), Rollout(*rows, finished=recorded.finished.reshape(-1)))
    verdicts = verification.wait()
    failed = np.array([verdict.error is not None for verdict in verdicts]).reshape(shape)
    if failed.any():
        found.not_compared.append(f"numbers of {failed.sum()} responses whose verification failed")
        before = int(row.get("reward/num_errors") or 0)
        if failed.sum() > before and not row.get("dynamic_sampling/num_carried_in"):
            found.same("verdicts", "how many verifications failed", before, int(failed.sum()))
    now = {name: values.reshape(shape) for name, values in scores_of(verdicts).items()}
    scores = {name: np.where(failed, recorded.score(name), values) for name, values in now.items()}
    given = {SCORE + name: values for name, values in recorded.scores.items() if name not in OWN_SCORES}
    found.batch(given, {SCORE + name: values for name, values in scores.items()})
    return replace(recorded, scores=scores)


def reward_again(found: Replay, recorded: Experience, shaped: Experience) -> Experience:
    """Compares the rewards of `shaped`, which then gets the recorded ones less the divergence, if there are such."""
    before, now = (
        {SCORE + name: values for name, values in one.scores.items() if name in OWN_SCORES}
        for one in (recorded, shaped)
    )
    final = before.pop(f"{SCORE}seq_final_reward", None)
    found.batch(before, now)
    if final is None:
        return shaped
    found.not_compared.append("the divergence in the reward: it needs the reference's weights")
    return shaped.with_scores(seq_final_reward=final)


def filter_again(found: Replay, shaped: Experience, options: FilterGroupsConfig, mesh: jax.sharding.Mesh) -> None:
    """Compares whether the filter keeps each group, if the run cannot have trained on others."""
    if options.enable and UNFILTERED & {options.on_limit, options.on_exhausted, options.on_empty}:
        found.not_compared.append("kept groups: a step may have taken unfiltered ones")
        return
    for number, keep in zip(shaped.numbers.tolist(), filter_groups(shaped, options, mesh).keep.tolist(), strict=True):
        found.same("kept groups", f"whether the group of prompt {number} is kept", True, keep)


def advantages_again(
    found: Replay, shaped: Experience, batching: Batching, kept: Arrays, kl_coef: float, *, has_teacher: bool
) -> Batch:
    """Compares advantages and returns [B, R]; returns the batch with them, or with those that it was kept with."""
    batch = rows_of(shaped, num_groups=batching.num_groups, pad_id=batching.pad_id)
    batch = without_unknown(batch, shaped.known)
    now = {"prompts": batch.prompts, "prompt_mask": batch.prompt_mask}
    found.batch({name: kept[name] for name in now}, now)
    batch = replace(batch, loss_mask=kept["loss_mask"], advantages=kept["advantages"])
    estimator = named_estimator(batching.algorithm.adv_estimator)
    extra = verdicts_of_rows(batching.algorithm, shaped, batch)
    extra |= {name: kept[name] for name in ("values", "importance_weights") if name in kept}
    missing = [name for name in OF_WEIGHTS if needs(estimator, name)]
    missing += ["what the teacher says"] * has_teacher
    if missing:
        found.not_compared.append(f"advantages: they need {', '.join(missing)}, and so weights")
        return batch
    rewards = token_rewards(batching, shaped, batch, kl_coef)
    advantages, returns = estimate_advantages(batching, rewards, batch, extra)
    now = {"advantages": advantages} | ({"returns": returns} if "returns" in kept else {})
    found.batch({name: kept[name] for name in now}, now)
    return replace(batch, advantages=advantages)


def compare_metrics(found: Replay, row: Mapping[str, float], batch: Batch) -> None:
    """Compares the statistics of the advantages with the run's metrics."""
    metrics = statistics.advantage_metrics("advantages", batch.advantages[batch.policy_mask])
    found.rows({name: row.get(name) for name in metrics}, metrics)
