"""Host: every metric and histogram of a run: name, unit, formula, source, and when it is there.

docs/metrics.md is written from it.

In a name, {a|b} is one of several parts, and {score}, {task}, {k} or {criterion} stands for what the run has.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

_PLACEHOLDERS = {
    "score": r"[^/]+",
    "task": r".+",
    "k": r"\d+",
    "n": r"\d+",
    "criterion": r"(?:token|seq_sum|seq_mean|seq_max)_k[123]",
}

VERL, TRINITY, OWN = "verl", "Trinity-RFT", "own"
DYNAMIC = "DAPO forks of verl and EasyR1"
UPDATE, EVALUATION, ALWAYS = "a batch was trained on", "an evaluation was due", "always"
AFTER_WARMUP = "a batch was trained on, after trainer.critic_warmup"
POLICY = f"the policy was updated: {AFTER_WARMUP}, with a token left in the loss"
SAMPLED = "groups were sampled"
WEIGHED, REJECTED = "rollout_correction.rollout_is", "rollout_correction.rollout_rs"
ACCELERATOR = "accelerator"


@dataclass(frozen=True)
class Metric:
    """One row of the catalogue. Every row of metrics.jsonl but that of step 0 has what is there `always`."""

    name: str
    unit: str
    formula: str
    source: str  # whose name and formula it has
    when: str = UPDATE  # when it is there
    needs: str = ""  # what a machine must have for it, beside a CPU

    def variants(self) -> list[str]:
        """The names with each choice of their {a|b} parts; placeholders stay."""
        parts = re.split(r"\{([^{}]*\|[^{}]*)\}", self.name)
        choices = [part.split("|") if index % 2 else [part] for index, part in enumerate(parts)]
        return ["".join(chosen) for chosen in itertools.product(*choices)]


def matches(variant: str, name: str) -> bool:
    """Whether `name` is an instance of this variant of a metric."""
    parts = re.split(r"\{(\w+)\}", variant)
    pattern = "".join(_PLACEHOLDERS[part] if index % 2 else re.escape(part) for index, part in enumerate(parts))
    return re.fullmatch(pattern, name) is not None


def find(name: str) -> Metric | None:
    """The metric whose name this is, None if it is not declared."""
    return next((metric for metric in CATALOGUE if any(matches(variant, name) for variant in metric.variants())), None)


def sections() -> Iterator[tuple[str, list[Metric]]]:
    """The catalogue by the first part of the names, in its order."""
    for section, metrics in itertools.groupby(CATALOGUE, key=lambda metric: metric.name.split("/")[0]):
        yield section, list(metrics)


_UPDATES = "optimizer steps (none for a mini-batch without a token to train on), and those that were not finite"
_ALARMS = (  # of alarms.py
    *("entropy_collapse", "entropy_explosion", "kl_jump", "kl_loss_jump", "mismatch_growth", "all_uniform"),
    *("truncation", "reward_errors", "reward_workers", "score_by_length"),
)
_SPREAD = "{mean|max|min}"
_PROBLEM = "{eval|bench}/{task}/{score}"

CATALOGUE = (
    # The samples of a step, before and after the group filter.
    Metric(
        f"rollout/{{score}}/{_SPREAD}",
        "the score's",
        "over all sampled groups, of the mean over a group's samples",
        TRINITY,
        f"{SAMPLED}; one for each number that the verifier returns, and overlong_reward, seq_reward",
    ),
    Metric(
        f"rollout/overlong/{_SPREAD}",
        "share",
        "sampled responses with an overlong penalty",
        VERL,
        "reward.overlong_buffer.enable and reward.overlong_buffer.log",
    ),
    Metric("rollout/finished_task_count", "groups", "groups that were sampled and verified", TRINITY, ALWAYS),
    Metric("rollout/model_version", "steps", "training steps that the sampling policy had seen", TRINITY, SAMPLED),
    Metric(
        "train/num_gen_batches",
        "rounds",
        "generation rounds (in stream mode: waves) until the batch was full",
        VERL,
        ALWAYS,
    ),
    Metric("train/filter_rate", "share", "dropped groups / sampled groups", DYNAMIC, SAMPLED),
    Metric(
        "train/mean_metric_std",
        "the metric's",
        "mean over sampled groups of the filter metric's standard deviation",
        DYNAMIC,
        SAMPLED,
    ),
    Metric(
        "train/num_kept_prompts",
        "groups",
        "sampled groups that passed, before the batch is cut to its size",
        DYNAMIC,
        ALWAYS,
    ),
    Metric("dynamic_sampling/num_gen_batches", "rounds", "as train/num_gen_batches", DYNAMIC, ALWAYS),
    Metric(
        "dynamic_sampling/num_accumulated_prompts",
        "groups",
        "train/num_kept_prompts and groups carried in",
        DYNAMIC,
        ALWAYS,
    ),
    Metric("dynamic_sampling/target_prompt_num", "groups", "data.train_batch_size", DYNAMIC, ALWAYS),
    Metric("dynamic_sampling/num_evaluated_prompts", "groups", "sampled groups", OWN, ALWAYS),
    Metric(
        "dynamic_sampling/filtered_{all_correct|all_wrong|other}",
        "groups",
        "dropped groups: all right, all wrong, neither or without acc",
        OWN,
        ALWAYS,
    ),
    Metric("dynamic_sampling/num_requeued", "groups", "sampled groups that will be sampled again", OWN, ALWAYS),
    Metric("dynamic_sampling/num_discarded_valid", "groups", "kept groups that are discarded", OWN, ALWAYS),
    Metric(
        "dynamic_sampling/num_carried_{in|out}",
        "groups",
        "kept groups carried in from the step before, and out to the next",
        OWN,
        ALWAYS,
    ),
    Metric(
        "dynamic_sampling/num_aborted", "groups", "groups that were started and not finished: always 0", OWN, ALWAYS
    ),
    Metric("dynamic_sampling/num_stale", "groups", "carried groups that were too old to train on", OWN, ALWAYS),
    Metric(
        "dynamic_sampling/uniform_share",
        "share",
        "groups whose samples all have the same acc / sampled groups",
        OWN,
        f"{SAMPLED}, of more than one sample",
    ),
    Metric(
        "dynamic_sampling/num_skipped_uniform",
        "prompts",
        "prompts skipped because their last groups were uniform",
        OWN,
        ALWAYS,
    ),
    Metric(
        "dynamic_sampling/partial_step", "0 or 1", "1 if the batch is incomplete or has unfiltered groups", OWN, ALWAYS
    ),
    Metric("dynamic_sampling/keep_rate_ema", "share", "moving average of the share of groups that pass", OWN, ALWAYS),
    Metric(
        "dynamic_sampling/effective_limit",
        "rounds",
        "current limit, in rounds of data.gen_batch_size prompts; 0 = no limit",
        OWN,
        ALWAYS,
    ),
    Metric(
        "dynamic_sampling/{generated|trained}_tokens",
        "tokens",
        "response tokens that were sampled, and trained on",
        OWN,
        ALWAYS,
    ),
    Metric("dynamic_sampling/overgen_ratio", "ratio", "generated tokens / trained tokens", OWN, ALWAYS),
    Metric(
        "dynamic_sampling/accepted_len_over_finished_kept_len",
        "ratio",
        "mean response length of accepted groups / of all kept groups; a long-run mean other than 1 is a bias",
        OWN,
        ALWAYS,
    ),
    Metric(
        "dynamic_sampling/first_release_s", "s", "from the start of the step until its batch is complete", OWN, ALWAYS
    ),
    Metric("experience_pipeline/experience_count", "responses", "responses that are trained on", TRINITY, ALWAYS),
    Metric("experience_pipeline/filtered_count", "responses", "responses of dropped groups", TRINITY, ALWAYS),
    Metric(
        f"experience_pipeline/group_advantages/reward_{{mean|std}}/{_SPREAD}",
        "reward",
        "over accepted groups, of the mean and standard deviation of a group's rewards (Trinity's: of the sample)",
        TRINITY,
    ),
    Metric(
        f"sample/model_version/{_SPREAD}",
        "steps",
        "training steps that the policy of each accepted group had seen",
        TRINITY,
    ),
    Metric(f"sample/staleness/{_SPREAD}", "steps", "step - 1 - model_version, of accepted groups", OWN),
    Metric("sample/task_count", "prompts", "distinct prompts in the batch", TRINITY),
    Metric("data/prompts_consumed", "prompts", "number of the next prompt", OWN, ALWAYS),
    Metric("data/epoch", "epochs", "prompts_consumed / prompts of the data", OWN, ALWAYS),
    Metric(
        "reward/unfiltered_mean",
        "reward",
        "mean reward of all sampled responses, to compare with critic/score",
        OWN,
        SAMPLED,
    ),
    Metric("reward/num_errors", "responses", "responses whose verification failed: they count as wrong", OWN, ALWAYS),
    Metric("reward/error_share", "share", "num_errors / sampled responses", OWN, SAMPLED),
    Metric(
        "reward/length_correlation",
        "-1 to 1",
        "of score and length over equally right answers to a prompt, where their scores differ",
        OWN,
        SAMPLED,
    ),
    Metric("reward/workers_replaced", "processes", "verifier processes that died or hung in the step", OWN, ALWAYS),
    # The batch.
    Metric(f"response_length/{_SPREAD}", "tokens", "of trained responses, end-of-sequence token included", VERL),
    Metric(
        "response_length/clip_ratio",
        "share",
        "responses of data.max_response_length tokens (verl: of the padded width)",
        VERL,
    ),
    Metric(f"prompt_length/{_SPREAD}", "tokens", "of the batch's prompts", VERL),
    Metric("prompt_length/clip_ratio", "share", "prompts of data.max_prompt_length tokens", VERL),
    Metric(
        "global_seqlen/{min|max|minmax_diff}",
        "tokens",
        "of consecutive shares of the batch, one for each of the devices that rows are divided over",
        VERL,
    ),
    Metric("global_seqlen/balanced_{min|max}", "tokens", "of what each of these devices is given", VERL),
    Metric("global_seqlen/mean", "tokens", "tokens of the batch with its prompts / number of shares", VERL),
    Metric(f"critic/score/{_SPREAD}", "reward", "verifier's or reward model's score with the overlong penalty", VERL),
    Metric(f"critic/rewards/{_SPREAD}", "reward", "score minus the KL divergence in the reward", VERL),
    Metric(f"critic/{{advantages|returns}}/{_SPREAD}", "1", "over response tokens", VERL),
    Metric(
        f"critic/values/{_SPREAD}",
        "reward",
        "the critic's values before the update, over response tokens",
        VERL,
        "adv_estimator=gae",
    ),
    Metric(
        "critic/vf_explained_var",
        "share",
        "1 - Var(returns - values) / (Var(returns) + 1e-5), sample variances",
        VERL,
        "adv_estimator=gae",
    ),
    Metric(
        "critic/{vf_loss|vf_clipfrac|vpred_mean}",
        "1",
        "value loss, share of clipped values, mean value",
        VERL,
        "adv_estimator=gae",
    ),
    Metric(
        "critic/{grad_norm|lr}",
        "1",
        "global norm before clipping, mean over optimizer steps; learning rate",
        VERL,
        "adv_estimator=gae",
    ),
    Metric("critic/{num_updates|skipped_updates}", "updates", _UPDATES, OWN, "adv_estimator=gae"),
    Metric(
        "critic/advantages_processed/{mean|max|min|std}",
        "1",
        "over the tokens of the samples that are kept",
        OWN,
        "algorithm.keep_pos_ratio or keep_neg_ratio below 1",
    ),
    # The update.
    Metric("actor/pg_loss", "1", "policy loss, mean over optimizer steps", VERL, POLICY),
    Metric("actor/loss", "1", "pg_loss + kl_loss_coef KL - entropy_coeff entropy", VERL, POLICY),
    Metric("actor/pg_clipfrac", "share", "tokens whose loss is clipped", VERL, "the policy loss clips"),
    Metric(
        "actor/pg_clipfrac_lower",
        "share",
        "tokens whose loss is clipped by the dual clip",
        VERL,
        "policy_loss.loss_mode=vanilla or geo_mean",
    ),
    Metric("actor/ppo_kl", "nats", "mean over tokens of old_logprob - logprob", VERL, POLICY),
    Metric(
        "actor/ppo_kl_abs", "nats", "mean over tokens of |old_logprob - logprob|", VERL, "policy_loss.loss_mode=kl_cov"
    ),
    Metric("actor/entropy", "nats", "mean token entropy, over optimizer steps", VERL, POLICY),
    Metric("actor/entropy_loss", "nats", "entropy, aggregated like the loss", VERL, "actor.entropy_coeff above 0"),
    Metric(
        "actor/kl_loss", "nats", "mean over tokens of the KL divergence to the reference", VERL, "actor.use_kl_loss"
    ),
    Metric("actor/kl_coef", "1", "actor.kl_loss_coef", VERL, "actor.use_kl_loss"),
    Metric(
        "actor/reward_kl_penalty",
        "nats",
        "mean over responses of their mean KL divergence",
        VERL,
        "algorithm.use_kl_in_reward",
    ),
    Metric("actor/reward_kl_penalty_coeff", "1", "its coefficient in the step", VERL, "algorithm.use_kl_in_reward"),
    Metric("actor/grad_norm", "1", "global norm before clipping, mean over optimizer steps", VERL, POLICY),
    Metric("actor/lr", "1", "learning rate", VERL, AFTER_WARMUP),
    Metric("actor/{num_updates|skipped_updates}", "updates", _UPDATES, OWN, AFTER_WARMUP),
    Metric("actor/recomputed_logprobs", "0 or 1", "1 if old log-probabilities are those of the training pass", OWN),
    Metric(
        "actor/kept_samples",
        "share",
        "samples that are trained on",
        OWN,
        "algorithm.keep_pos_ratio or keep_neg_ratio below 1",
    ),
    Metric(
        "actor/overlong_filtered",
        "share",
        "responses left out of the loss because they were truncated",
        OWN,
        "algorithm.overlong_filtering",
    ),
    # Sampling against training. d is the training pass' log-probability less the sampler's.
    Metric("rollout_corr/logprob_abs_diff", "nats", "mean over tokens of |d|", OWN, POLICY),
    Metric("rollout_corr/logprob_abs_diff_max", "nats", "largest |d|", OWN, POLICY),
    Metric("rollout_corr/logprob_outliers", "share", "tokens with |d| above 0.05", OWN, POLICY),
    Metric("rollout_corr/k3_kl", "nats", "mean over tokens of exp(d) - 1 - d", VERL, POLICY),
    Metric("rollout_corr/eff_sample_size", "share", "mean(exp(d))^2 / mean(exp(d)^2)", OWN, POLICY),
    Metric(
        "rollout_corr/first_clipfrac",
        "share",
        "clipped tokens in the first optimizer step",
        OWN,
        "the policy loss clips and does not select tokens; old log-probabilities are the sampler's",
    ),
    Metric("rollout_corr/kl", "nats", "mean over tokens of -d", VERL, "recomputed log-probabilities"),
    Metric(
        "rollout_corr/{training|rollout}_{log_ppl|ppl}",
        "nats or 1",
        "mean over responses of the negative mean log-probability, and of its exponential",
        VERL,
        "recomputed log-probabilities",
    ),
    Metric(
        "rollout_corr/log_ppl_{diff|abs_diff|diff_max|diff_min}",
        "nats",
        "over responses, log_ppl of training minus log_ppl of rollout",
        VERL,
        "recomputed log-probabilities",
    ),
    Metric(
        "rollout_corr/ppl_ratio",
        "ratio",
        "mean over responses of training's / rollout's perplexity",
        VERL,
        "recomputed log-probabilities",
    ),
    Metric(
        "rollout_corr/chi2_{token|seq}",
        "1",
        "mean of exp(2d) - 1 over tokens, and over responses with the sum of d",
        VERL,
        "recomputed log-probabilities",
    ),
    Metric(
        "rollout_corr/rollout_is_{mean|max|min|std|eff_sample_size}",
        "1",
        "of the importance weights over tokens; with rollout_is=sequence max and min are of the raw ones",
        VERL,
        WEIGHED,
    ),
    Metric(
        "rollout_corr/rollout_is_seq_{mean|max|min|std}",
        "1",
        "over responses, of the mean weight of each (verl's std: the sample's)",
        VERL,
        WEIGHED,
    ),
    Metric(
        "rollout_corr/rollout_is_seq_max_deviation",
        "1",
        "largest distance of a response's mean weight from 1",
        VERL,
        WEIGHED,
    ),
    Metric(
        "rollout_corr/rollout_is_ratio_fraction_{high|low}",
        "share",
        "tokens (rollout_is=sequence: responses) whose raw weight is above the threshold, or below its lower end "
        "(1 / threshold without one)",
        VERL,
        WEIGHED,
    ),
    Metric(
        "rollout_corr/rollout_is_seq_fraction_{high|low}",
        "share",
        "responses whose mean raw weight is beyond them",
        VERL,
        WEIGHED,
    ),
    Metric(
        "rollout_corr/rollout_is_oob_ratio",
        "share",
        "tokens whose raw weight is outside the band",
        VERL,
        'rollout_correction.rollout_is_threshold="low_high"',
    ),
    Metric(
        "rollout_corr/rollout_is_batch_norm_factor",
        "1",
        "mean by which all weights are divided; the weights' metrics are from before that",
        VERL,
        "rollout_correction.rollout_is_batch_normalize",
    ),
    Metric(
        "rollout_corr/rollout_rs_{masked|seq_masked}_fraction",
        "share",
        "tokens that are left out, and responses that lose one",
        VERL,
        REJECTED,
    ),
    Metric(
        "rollout_corr/rollout_rs_{criterion}_{masked|seq_masked}_fraction",
        "share",
        "the same for one criterion",
        VERL,
        REJECTED,
    ),
    Metric(
        "rollout_corr/rollout_rs_{criterion}_{mean|std}",
        "nats",
        "over tokens, of the criterion's value; std with values beyond a threshold put there",
        VERL,
        REJECTED,
    ),
    Metric(
        "rollout_corr/rollout_rs_{criterion}_{max|min}",
        "nats",
        "of the tokens or responses that it judges",
        VERL,
        REJECTED,
    ),
    Metric(
        "rollout_corr/rollout_rs_{criterion}_fraction_{high|low}",
        "share",
        "tokens or responses that it judges whose value is beyond a threshold",
        VERL,
        REJECTED,
    ),
    Metric(
        "rollout_corr/rollout_rs_{criterion}_seq_{mean|max|min|std}",
        "nats",
        "over responses, of the mean value of each (verl's std: the sample's)",
        VERL,
        REJECTED,
    ),
    Metric(
        "rollout_corr/rollout_rs_{criterion}_seq_max_deviation",
        "nats",
        "largest distance of such a mean from 0",
        VERL,
        REJECTED,
    ),
    Metric(
        "rollout_corr/rollout_rs_{criterion}_seq_fraction_{high|low}",
        "share",
        "responses whose mean value is beyond a threshold",
        VERL,
        REJECTED,
    ),
    Metric(
        "training/rollout_probs_diff_{mean|max|std}",
        "probability",
        "over tokens, |probability of the training pass - sampler's|",
        VERL,
        "recomputed log-probabilities",
    ),
    Metric(
        "training/rollout_actor_probs_pearson_corr",
        "1",
        "Pearson's correlation of the two over tokens",
        VERL,
        "recomputed log-probabilities",
    ),
    Metric(f"alarm/{{{'|'.join(_ALARMS)}}}", "0 or 1", "1 while the step looks wrong (monitor/alarms.py)", OWN, ALWAYS),
    Metric(
        "alarm/heldout_drop",
        "0 or 1",
        "1 while held-out accuracy is far below the run's best",
        OWN,
        f"{EVALUATION}, with held-out problems",
    ),
    # Time and devices.
    Metric("perf/total_num_tokens", "tokens", "tokens of the trained sequences, each with its prompt", VERL),
    Metric("perf/time_per_step", "s", "of the step without evaluation and saving", VERL, ALWAYS),
    Metric("perf/throughput", "tokens/s", "total_num_tokens / time_per_step / devices", VERL),
    Metric(
        "perf/forward_tflop",
        "10^12 operations",
        "of one forward pass over the trained sequences (step_metrics.py)",
        OWN,
    ),
    Metric(
        "perf/mfu/{actor|actor_infer|critic}",
        "share",
        "forward passes (an epoch of updates: 3, adapters 2) x operations / (stage's time x devices x peak)",
        VERL,
        "the device's peak is known",
        ACCELERATOR,
    ),
    Metric(
        "perf/max_memory_{allocated|reserved}_gb",
        "GiB",
        "peak over the devices of process 0 since the run began",
        VERL,
        "the device reports it",
        ACCELERATOR,
    ),
    Metric("perf/cpu_memory_used_gb", "GiB", "used memory of process 0's host", VERL, "Linux"),
    Metric("timing_s/step", "s", "as perf/time_per_step", VERL, ALWAYS),
    Metric("timing_s/{gen|reward}", "s", "sampling, and waiting for verdicts", VERL, SAMPLED),
    Metric(
        "timing_s/{old_log_prob|ref|values|adv|update_critic|update_actor}",
        "s",
        "stages of training",
        VERL,
        "the step has the stage",
    ),
    Metric(
        "timing_s/update_weights",
        "s",
        "re-laying the policy's weights for decoding",
        VERL,
        "they have changed since the last sampling",
    ),
    Metric("timing_s/{shape|filter}", "s", "overlong penalty and group filter of all sampled groups", OWN, SAMPLED),
    Metric("timing_s/batch", "s", "turning accepted groups into padded rows", OWN),
    Metric(
        "timing_s/write", "s", "writing responses and histograms to disk in process 0, outside the step", OWN, ALWAYS
    ),
    Metric("timing_s/testing", "s", "evaluation, outside the step", VERL, EVALUATION),
    Metric(
        "timing_s/save_checkpoint",
        "s",
        "saving the last checkpoint, outside the step; logged in the row of the next step",
        VERL,
        "the step before was saved",
    ),
    Metric(
        "timing_per_token_ms/gen", "ms", "timing_s/gen / all tokens that were sampled (verl: those of the batch)", VERL
    ),
    Metric(
        "timing_per_token_ms/{old_log_prob|ref|values|adv|update_critic|update_actor}",
        "ms",
        "timing_s / perf/total_num_tokens",
        VERL,
        "the step has the stage",
    ),
    Metric("time/wait_explore_step", "s", "timing_s/gen + timing_s/reward", TRINITY, SAMPLED),
    Metric("time/train_step", "s", "sum of the stages of training", TRINITY),
    Metric(
        "time/experience_pipeline/operator/{0_RewardShaping|1_GroupFilter}",
        "s",
        "as timing_s/shape and timing_s/filter, each with the wait for its result",
        TRINITY,
        SAMPLED,
    ),
    Metric(
        "time/experience_pipeline/operator/{2_BatchAssembly|3_GroupAdvantage}",
        "s",
        "as timing_s/batch and timing_s/adv; adv waits for the advantages",
        TRINITY,
    ),
    Metric("time/experience_pipeline/write", "s", "as timing_s/write; there is no experience buffer", TRINITY, ALWAYS),
    Metric(
        "time/experience_pipeline/total", "s", "sum of operators and write, without forward passes", TRINITY, ALWAYS
    ),
    Metric("time/eval", "s", "as timing_s/testing", TRINITY, EVALUATION),
    Metric("time/save_checkpoint", "s", "as timing_s/save_checkpoint", TRINITY, "the step before was saved"),
    Metric("time/bench", "s", "of loading and measuring a model", TRINITY, "the evaluation command"),
    # Evaluation. `eval` in training, `bench` by the command; {task} is a task set, or a data source that is held out.
    Metric(
        f"{_PROBLEM}/mean@{{n}}", "the score's", "mean over problems of the mean of the n samples", TRINITY, EVALUATION
    ),
    Metric(
        f"{_PROBLEM}/std@{{n}}",
        "the score's",
        "mean over problems of the standard deviation of the n samples",
        TRINITY,
        EVALUATION,
    ),
    Metric(
        f"{_PROBLEM}/{{best|worst}}@{{k}}",
        "the score's",
        "mean over problems of the expected best and worst of k samples (evaluation.md)",
        TRINITY,
        "evaluation with n above 1; k is 2, 4, 8 ... and n",
    ),
    Metric(
        f"{_PROBLEM}/maj@{{k}}",
        "the score's",
        "mean over problems of the value of the most frequent answer",
        VERL,
        "the verifier returns pred; k = n, with evaluate.bootstrap each k",
    ),
    Metric(
        "{eval|bench}/{task}/acc/pass@{k}",
        "share",
        "mean over problems of 1 - C(n - c, k) / C(n, k), c samples of acc 1",
        "arXiv:2107.03374, eq. 1",
        EVALUATION,
    ),
    Metric(
        f"{_PROBLEM}/{{best|worst|maj}}@{{k}}/bootstrap_std",
        "the score's",
        "mean over problems of the deviation over the draws",
        VERL,
        "evaluate.bootstrap",
    ),
    Metric(
        f"{_PROBLEM}/{{mean|std|best|worst|maj|pass}}@{{k}}/{{mean|max|min|std}}",
        "the score's",
        "the same over problems",
        TRINITY,
        "monitor.detailed_stats",
    ),
    Metric(f"{{eval|bench}}/{{task}}/response_length/{_SPREAD}", "tokens", "of all samples", OWN, EVALUATION),
    Metric(
        "{eval|bench}/{task}/response_length/clip_ratio",
        "share",
        "samples of data.max_response_length tokens",
        OWN,
        EVALUATION,
    ),
    Metric(
        "{eval|bench}/{task}/finished_task_count",
        "problems",
        "problems that were sampled and verified",
        TRINITY,
        EVALUATION,
    ),
    Metric(
        "{eval|bench}/num_errors",
        "responses",
        "samples whose verification failed: they count as wrong",
        OWN,
        EVALUATION,
    ),
)

HISTOGRAMS = (  # of the trained batch, only for TensorBoard
    Metric("critic/score", "reward", "score of each response, with the overlong penalty", OWN),
    Metric("critic/advantages", "1", "of each token that is trained on", OWN),
    Metric("response_length", "tokens", "of each response", OWN),
    Metric("rollout/logprob", "nats", "the sampler's, of each token", OWN),
    Metric(
        "actor/ratio",
        "ratio",
        "exp(logprob - old_logprob) of each token that is trained on in each optimizer step, rounded to hundredths; "
        "2 holds everything above",
        OWN,
        POLICY,
    ),
)
