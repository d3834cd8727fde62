"""Host: what the report says about metrics, stages and alarms; tables of words, without code."""

from typing import NamedTuple


class Chart(NamedTuple):
    title: str
    metric: str
    unit: str
    meaning: str  # what it is, and what to expect
    noise: float = 0.0  # changes up to it are rounding


CHARTS = (
    Chart(
        "Training accuracy",
        "rollout/acc/mean",
        "share of responses",
        "Of all sampled responses, before the filter. It rises if the run learns its training problems.",
    ),
    Chart(
        "Reward of the trained batch",
        "critic/score/mean",
        "reward",
        "With the overlong penalty, after the filter. The filter keeps mixed groups, so it moves less than accuracy.",
    ),
    Chart(
        "Groups dropped",
        "train/filter_rate",
        "share of sampled groups",
        "Groups whose responses are equally right. Often between 0.2 and 0.8; it grows as problems become too easy.",
    ),
    Chart(
        "Sampling rounds per step",
        "train/num_gen_batches",
        "rounds",
        "Rounds of prompts until a batch of kept groups was full. More rounds mean more sampling for one update.",
    ),
    Chart(
        "Response length",
        "response_length/mean",
        "tokens",
        "Mean of the trained responses. A steady fall or rise without better accuracy is a warning.",
    ),
    Chart(
        "Responses cut off",
        "response_length/clip_ratio",
        "share of responses",
        "Trained responses that end at the length limit. A few percent at most is healthy.",
    ),
    Chart(
        "Entropy",
        "actor/entropy",
        "nats per token",
        "How undecided the policy is. A slow fall is normal; near zero it no longer explores.",
    ),
    Chart(
        "KL from the sampling policy",
        "actor/ppo_kl",
        "nats per token",
        "How far the updates of one step move the policy. It is 0 with one update per step.",
        noise=1e-6,
    ),
    Chart(
        "KL from the reference",
        "actor/kl_loss",
        "nats per token",
        "How far the policy is from the reference model.",
    ),
    Chart(
        "Clipped tokens",
        "actor/pg_clipfrac",
        "share of tokens",
        "Tokens whose loss is clipped. It is 0 with one update per step, and usually below 0.1.",
    ),
    Chart(
        "Gradient norm",
        "actor/grad_norm",
        "norm before clipping",
        "Sudden peaks mean unusual batches or too large a learning rate.",
    ),
    Chart(
        "Sampler against training",
        "rollout_corr/k3_kl",
        "nats per token",
        "How much the two passes disagree on the same tokens. Below 1e-3 in bfloat16, 1e-6 in float32.",
        noise=1e-7,
    ),
    Chart(
        "Explained variance of the critic",
        "critic/vf_explained_var",
        "share",
        "1 is a perfect critic, 0 no better than a constant.",
    ),
    Chart(
        "Load of the busiest expert",
        "router/max_load",
        "times the mean",
        "1 is an even load.",
    ),
    Chart(
        "Learning rate",
        "actor/lr",
        "",
        "Warm-up and schedule.",
    ),
    Chart(
        "Generated per trained token",
        "dynamic_sampling/overgen_ratio",
        "ratio",
        "The price of the filter: 1 trains on every sampled token.",
    ),
    Chart(
        "Speed",
        "perf/throughput",
        "trained tokens per second and device",
        "Prompts included. The first step also compiles.",
    ),
    Chart(
        "Time per step",
        "perf/time_per_step",
        "seconds",
        "Without evaluation and saving. The first step also compiles.",
    ),
)

EFFICIENCY = {  # metric -> what works, what its waste is
    "perf/prefill_efficiency": ("Reading prompts", "padding, and prompts read more than once"),
    "perf/decode_efficiency": ("Sampling tokens", "rows that have ended, and room for keys that do not exist"),
    "perf/update_efficiency": ("Updating the policy", "padding, and prompts computed more than once"),
    "perf/reward_model_efficiency": ("Reward model", "padding"),
}


class Alarm(NamedTuple):
    title: str
    limit: str | None  # the option of monitor.alarms, shown as {limit}
    meaning: str
    cure: str


ALARMS = {
    "entropy_collapse": Alarm(
        "Entropy collapsed",
        "entropy_collapse",
        "Entropy fell below {limit} times that of the first step: the policy hardly explores any more. On an easy task "
        "this can be a sign of success.",
        "If accuracy has stalled, raise actor.clip_ratio_high (0.28, then 0.3), make fewer updates per step with a "
        "larger actor.ppo_mini_batch_size, or lower actor.optim.lr.",
    ),
    "entropy_explosion": Alarm(
        "Entropy exploded",
        "entropy_explosion",
        "Entropy rose above {limit} times that of the first step: responses become random text.",
        "Halve actor.optim.lr, then lower actor.clip_ratio_high, and check whether nonsense can earn the reward.",
    ),
    "kl_jump": Alarm(
        "The policy jumped",
        "kl_jump",
        "The updates of one step moved the policy more than {limit} times as far as usual.",
        "Lower actor.optim.lr or actor.grad_clip, and look at the batch of that step in samples/.",
    ),
    "kl_loss_jump": Alarm(
        "The policy jumped away from the reference",
        "kl_jump",
        "The KL divergence to the reference rose above {limit} times its running mean.",
        "Lower actor.optim.lr or raise actor.kl_loss_coef, and look at the batch of that step in samples/.",
    ),
    "mismatch_growth": Alarm(
        "Sampler and training disagree more",
        "mismatch_growth",
        "The log-probabilities of the sampler and of the training pass differ more than {limit} times as much as "
        "usual, so the importance ratios are less reliable.",
        "Use actor.old_logprob=recompute or model.dtype=float32, or correct the weights with "
        "algorithm.rollout_correction.",
    ),
    "all_uniform": Alarm(
        "No group had a signal",
        None,
        "In every sampled group all responses were equally right, so there was nothing to learn from.",
        "If all were wrong, take easier problems or check the verifier and the answer format; if all were right, take "
        "harder problems; or raise rollout.n.",
    ),
    "truncation": Alarm(
        "Responses are cut off",
        "truncation",
        "More than {limit} of the trained responses ended at the length limit, so they are judged without their end.",
        "Raise data.max_response_length, use reward.overlong_buffer, or leave them out of the loss with "
        "algorithm.overlong_filtering=True.",
    ),
    "reward_errors": Alarm(
        "Verdicts are missing",
        "reward_errors",
        "The verification of more than {limit} of the responses failed; they are wrong, or left out of their groups.",
        "Read the warnings of the log for function and cause, and correct the reward function or raise "
        "reward.timeout_s.",
    ),
    "reward_workers": Alarm(
        "Verifier processes died",
        None,
        "At least one verifier process died or hung and was replaced; its response counts as wrong.",
        "Read the warnings of the log. Raise reward.memory_limit_mb or reward.timeout_s if the verifier needs more.",
    ),
    "score_by_length": Alarm(
        "The score follows the length",
        "score_by_length",
        "Among equally right answers, score and length correlate by more than {limit}: the policy learns a length "
        "instead of an answer.",
        "Take length out of the reward function and use reward.overlong_buffer; if you want the effect, set "
        "monitor.alarms.score_by_length=1.",
    ),
    "slow_process": Alarm(
        "A process is slow",
        "slow_process",
        "One process took over {limit} times the median one's seconds for its own work, and the others waited for it.",
        "Look at the host of the process that time/slowest_process names (its load, its disk, its judge's answers); "
        "time/slowest_process/* says at what it is slow.",
    ),
    "heldout_drop": Alarm(
        "Held-out accuracy dropped",
        "heldout_drop",
        "Held-out accuracy fell below {limit} times the best of the run. If the reward rises meanwhile, wrong answers "
        "earn it. With few held-out problems it can be noise.",
        "Read late samples, export the best checkpoint (trainer.keep_best_ckpt keeps it), and correct the reward or "
        "lower actor.optim.lr.",
    ),
}

_RELATIVE = "A response's advantage is its reward minus the mean of its group"
ESTIMATORS = {  # algorithm.adv_estimator -> a sentence
    "grpo": f"{_RELATIVE}, divided by the group's standard deviation",
    "dapo": f"{_RELATIVE}, divided by the group's standard deviation",
    "dr_grpo": f"{_RELATIVE} (Dr. GRPO)",
    "rloo": "A response's advantage is its reward minus the mean of the others in its group (RLOO)",
    "remax": "A response's advantage is its reward minus that of the greedy response (ReMax)",
    "gae": "A critic estimates the value of each token (GAE)",
}
