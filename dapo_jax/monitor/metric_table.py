"""Host: the table of every metric and histogram that a run logs; catalogue.py reads it, docs/metrics.md shows it.

A new metric is one line: name, unit and value, with at least two spaces between them; an indented line continues the
value. The header above says [whose name and formula | when it is logged | what it needs besides a CPU]. In a name,
{a|b} is one of several parts, and {score}, {task}, {k} or {criterion} stands for what the run has.

Lines that begin with one name part must be together. `always`: in every row of metrics.jsonl but that of step 0.
"""

METRICS = """
# Samples, before and after the group filter.

[Trinity-RFT | groups were sampled; one for each number that the verifier returns, overlong_reward,
    length_reward (reward.length) and seq_reward]
rollout/{score}/{mean|max|min}  the score's  over all sampled groups, of the mean over a group's samples
[verl | reward.overlong_buffer.enable and reward.overlong_buffer.log]
rollout/overlong/{mean|max|min}  share  sampled responses with an overlong penalty
[Trinity-RFT | always]
rollout/finished_task_count  groups  groups sampled and verified
[Trinity-RFT | groups were sampled]
rollout/model_version  steps  training steps that the sampling policy had seen

[verl | always]
train/num_gen_batches  rounds  rounds of data.gen_batch_size prompts that were judged, an incomplete one counts
[DAPO forks of verl and EasyR1 | groups were sampled]
train/filter_rate      share         dropped groups / sampled groups
train/mean_metric_std  the metric's  mean over sampled groups of the filter metric's standard deviation
[DAPO forks of verl and EasyR1 | always]
train/num_kept_prompts  groups  sampled groups that passed, before the batch is cut to its size

[DAPO forks of verl and EasyR1 | always]
dynamic_sampling/num_gen_batches          rounds  as train/num_gen_batches
dynamic_sampling/num_accumulated_prompts  groups  train/num_kept_prompts plus the groups carried in
dynamic_sampling/target_prompt_num        groups  data.train_batch_size
[own | always]
dynamic_sampling/num_evaluated_prompts  groups  sampled groups
dynamic_sampling/filtered_{all_correct|all_wrong|other}  groups  dropped groups: all right, all wrong,
    neither or without acc
dynamic_sampling/num_requeued           groups  sampled groups that will be sampled again
dynamic_sampling/num_discarded_valid    groups  kept groups that are discarded
dynamic_sampling/num_carried_{in|out}   groups  kept groups carried in from the previous step, and out to the next
dynamic_sampling/num_aborted            responses  begun and given up when the batch was certain (docs/rollout.md)
dynamic_sampling/num_begun              groups  under way, which the next step continues (rollout.segment_length)
dynamic_sampling/num_stale              groups  carried groups that were too old to train on
dynamic_sampling/num_skipped_uniform    prompts  prompts skipped by skip_uniform or data.curriculum
dynamic_sampling/partial_step           0 or 1  1 if the batch is incomplete or has unfiltered groups
dynamic_sampling/keep_rate_ema          share   moving average of the share of groups that pass
dynamic_sampling/effective_limit        rounds  current limit, in rounds of data.gen_batch_size prompts; 0 = no limit
dynamic_sampling/{generated|trained}_tokens  tokens  response tokens sampled, and trained on
dynamic_sampling/overgen_ratio          ratio   generated tokens / trained tokens
dynamic_sampling/accepted_len_over_finished_kept_len  ratio  mean response length of accepted groups / of all kept
    groups; a long-run mean other than 1 is a bias
dynamic_sampling/first_release_s        s       from the start of the step until its batch is complete
[own | groups were sampled, of more than one sample]
dynamic_sampling/uniform_share  share  groups whose samples all have the same acc / sampled groups

[own | data.curriculum.enable]
curriculum/rate         share  probability of being sampled, mean over the rows of the data
curriculum/floor_share  share  rows that are sampled with the smallest probability, data.curriculum.floor
curriculum/{easy|normal|hard}_share  share  rows whose latest group was all right, neither, or all wrong; the others
    are new

[Trinity-RFT | always]
experience_pipeline/experience_count  responses  responses trained on
experience_pipeline/filtered_count    responses  responses of dropped groups
[Trinity-RFT | a batch was trained on]
experience_pipeline/group_advantages/reward_{mean|std}/{mean|max|min}  reward  over accepted groups, of the mean and
    standard deviation of a group's rewards (Trinity's: sample standard deviation)

[Trinity-RFT | a batch was trained on]
sample/model_version/{mean|max|min}  steps  training steps that the policy of each accepted group had seen
sample/task_count  prompts  distinct prompts in the batch
[own | a batch was trained on]
sample/staleness/{mean|max|min}  steps  step - 1 - model_version, of accepted groups
[own | a batch was trained on | rollout.segment_length]
sample/token_staleness/{mean|max|min}  steps  step - 1 - the version of the policy that drew each token

[own | files are mixed | data.mixture]
mixture/{task}/num_prompts  groups  sampled groups of a file of data.train_files, which goes by its name
mixture/{task}/epoch        epochs  passes over its rows up to the next prompt
[own | groups of the file were sampled | data.mixture]
mixture/{task}/kept_share   share   its groups that passed the filter
mixture/{task}/{acc|score}  the score's  mean over its sampled responses with a verdict

[own | always]
data/prompts_consumed  prompts  index of the next prompt
data/epoch             epochs   prompts_consumed / prompts of the data

[own | groups were sampled]
reward/unfiltered_mean  reward  mean reward of all sampled responses with a verdict, to compare with critic/score
reward/error_share      share   num_errors / sampled responses
reward/length_correlation  -1 to 1  correlation of score and length among equally right answers to a prompt, where
    their scores differ
[own | always]
reward/num_errors        responses  responses whose verification failed: they are wrong, or among reward/num_missing
reward/num_missing       responses  responses without a verdict: they leave their groups, and no statistic has them
reward/workers_replaced  processes  verifier processes that died or hung in the step
[own | the judge scores; since the last step, evaluations included, over all processes | an endpoint for reward.judge]
reward/judge/requests  responses  that the judge was asked about
reward/judge/retries   requests   further attempts
reward/judge/cached    responses  whose verdict was known: from an equal response, or kept in the work directory
reward/judge/failures  responses  without a verdict: they are among reward/num_errors
reward/judge/{input_tokens|output_tokens}  tokens  of the judge, as the endpoint counts them
reward/judge/seconds   s          spent on requests and the waits before retries, summed over concurrent ones
reward/judge/{cost|total_cost}  currency  of the tokens, and of all tokens of the work directory so far

# The batch.

[verl | a batch was trained on]
response_length/{mean|max|min}  tokens  of trained responses, end-of-sequence token included
response_length/clip_ratio      share   responses of data.max_response_length tokens (verl: of the padded width)
[own | a batch was trained on]
response_length/p{10|25|50|75|90|99}  tokens  percentiles
response_length/within_prompts  share  of the variance of log-lengths that lies within a prompt's responses (1 if there
    is nothing to compare)
[verl | a batch was trained on]
prompt_length/{mean|max|min}    tokens  of the batch's prompts
prompt_length/clip_ratio        share   prompts of data.max_prompt_length tokens
[own | a batch was trained on]
prompt_length/p{10|25|50|75|90|99}  tokens  percentiles
[verl | a batch was trained on]
global_seqlen/{min|max|minmax_diff}  tokens  of consecutive shares of the batch, one per device that rows are divided
    over
global_seqlen/balanced_{min|max}     tokens  of what each of these devices is given
global_seqlen/mean                   tokens  tokens of the batch with its prompts / number of shares

[verl | a batch was trained on]
critic/score/{mean|max|min}    reward  the verifier's or reward model's score with overlong penalty and length
    reward
critic/rewards/{mean|max|min}  reward  score minus the KL divergence in the reward
critic/{advantages|returns}/{mean|max|min}  1  over response tokens
[verl | adv_estimator=gae]
critic/values/{mean|max|min}  reward  the critic's values before the update, over response tokens
critic/vf_explained_var       share   1 - Var(returns - values) / (Var(returns) + 1e-5), sample variances
critic/{vf_loss|vf_clipfrac|vpred_mean}  1  value loss, share of clipped values, mean value
critic/{grad_norm|lr}         1       global norm before clipping, mean over optimizer steps; learning rate
[own | adv_estimator=gae]
critic/{num_updates|skipped_updates}  updates  optimizer steps (none for a mini-batch without a token to train on),
    and those that were not finite
[own | algorithm.keep_pos_ratio or keep_neg_ratio below 1]
critic/advantages_processed/{mean|max|min|std}  1  over the tokens of the samples that are kept

# The update.

[verl | the policy was updated: a batch was trained on, after trainer.critic_warmup, with a token left in the loss]
actor/pg_loss    1     policy loss, mean over optimizer steps
actor/loss       1     pg_loss + kl_loss_coef KL - entropy_coeff entropy + distillation.weight distillation_loss
actor/ppo_kl     nats  mean over tokens of old_logprob - logprob
actor/entropy    nats  mean token entropy, over optimizer steps
actor/grad_norm  1     global norm before clipping, mean over optimizer steps
[verl | the policy loss clips]
actor/pg_clipfrac  share  tokens whose loss is clipped
[verl | policy_loss.loss_mode=vanilla, geo_mean, dppo_tv or dppo_kl]
actor/pg_clipfrac_lower  share  tokens whose loss is clipped by the dual clip; geo_mean: out of the band with A < 0;
    dppo: whose weight is clip_ratio_c
[verl | policy_loss.loss_mode=kl_cov]
actor/ppo_kl_abs  nats  mean over tokens of |old_logprob - logprob|
[verl | actor.entropy_coeff above 0]
actor/entropy_loss  nats  entropy, aggregated like the loss
[verl | actor.use_kl_loss]
actor/kl_loss  nats  mean over tokens of the KL divergence to the reference
actor/kl_coef  1     actor.kl_loss_coef
[own | algorithm.distillation.form=top_k]
actor/distillation_loss  nats  mean over tokens of the reverse KL divergence to the teacher, over the policy's
    most likely tokens and one bucket for all others
[verl | algorithm.use_kl_in_reward]
actor/reward_kl_penalty        nats  mean over responses of their mean KL divergence
actor/reward_kl_penalty_coeff  1     its coefficient in the step
[verl | a batch was trained on, after trainer.critic_warmup]
actor/lr  1  learning rate
[own | a batch was trained on, after trainer.critic_warmup]
actor/{num_updates|skipped_updates}  updates  optimizer steps (none for a mini-batch without a token to train on),
    and those that were not finite
[own | a batch was trained on]
actor/recomputed_logprobs  0 or 1  1 if old log-probabilities are those of the training pass
[own | algorithm.keep_pos_ratio or keep_neg_ratio below 1]
actor/kept_samples  share  samples that are trained on
[own | actor.off_policy_mask_threshold]
actor/off_policy_masked  share  tokens of bad responses that drifted too far to be trained on
[own | algorithm.top_entropy_quantile below 1]
actor/entropy_threshold  nats  lowest entropy of a token with an advantage
[own | algorithm.overlong_filtering]
actor/overlong_filtered  share  responses left out of the loss because they were truncated

# On-policy distillation.

[own | algorithm.distillation.path, and a token is left in the loss]
distillation/reverse_kl  nats  mean over trained tokens of log p - log q, of the policy and the teacher: an estimate of
    the divergence
[own | algorithm.distillation.form=top_k]
distillation/student_mass  share  mean over trained tokens of the policy's probability of its top_k tokens

# Mixtures of experts in the update.

[own | the policy was updated, and has experts]
router/aux_loss  1      transformers' load-balancing loss of the update's tokens, not trained on: E times the sum over
    experts of their choices per token times their mean probability, over all layers; equal loads give experts per token
router/max_load  ratio  tokens of the most loaded expert / mean of its layer, over all layers
router/min_load  ratio  the same of the least loaded expert; 0 = some expert had no token
[own | the policy was updated, and has experts; model.router_replay]
router/replay_differs  share  choices of experts of the sampler that the training pass would not have made

# Sampling against training. d is the training pass's log-probability minus the sampler's.

[own | the policy was updated: a batch was trained on, after trainer.critic_warmup, with a token left in the loss]
rollout_corr/logprob_abs_diff      nats   mean over tokens of |d|
rollout_corr/logprob_abs_diff_max  nats   largest |d|
rollout_corr/logprob_outliers      share  tokens with |d| above 0.05
rollout_corr/eff_sample_size       share  mean(exp(d))^2 / mean(exp(d)^2)
[verl | the policy was updated: a batch was trained on, after trainer.critic_warmup, with a token left in the loss]
rollout_corr/k3_kl  nats  mean over tokens of exp(d) - 1 - d
[own | the policy loss clips and does not select tokens; old log-probabilities are the sampler's]
rollout_corr/first_clipfrac  share  clipped tokens in the first optimizer step
[verl | recomputed log-probabilities]
rollout_corr/kl  nats  mean over tokens of -d
rollout_corr/{training|rollout}_{log_ppl|ppl}  nats or 1  mean over responses of the negative mean log-probability,
    and of its exponential
rollout_corr/log_ppl_{diff|abs_diff|diff_max|diff_min}  nats  over responses, log_ppl of training minus log_ppl of
    rollout
rollout_corr/ppl_ratio         ratio  mean over responses of training's / rollout's perplexity
rollout_corr/chi2_{token|seq}  1      mean of exp(2d) - 1 over tokens, and over responses with the sum of d
[verl | rollout_correction.rollout_is]
rollout_corr/rollout_is_{mean|max|min|std|eff_sample_size}  1  of the importance weights over tokens; with
    rollout_is=sequence max and min are of the raw ones
rollout_corr/rollout_is_seq_{mean|max|min|std}  1  over responses, of the mean weight of each (verl's std: sample
    standard deviation)
rollout_corr/rollout_is_seq_max_deviation  1  largest distance of a response's mean weight from 1
rollout_corr/rollout_is_ratio_fraction_{high|low}  share  tokens (rollout_is=sequence: responses) whose raw weight is
    above the threshold, or below its lower end (1 / threshold without one)
rollout_corr/rollout_is_seq_fraction_{high|low}    share  responses whose mean raw weight is beyond them
[verl | rollout_correction.rollout_is_threshold="low_high"]
rollout_corr/rollout_is_oob_ratio  share  tokens whose raw weight is outside the band
[verl | rollout_correction.rollout_is_batch_normalize]
rollout_corr/rollout_is_batch_norm_factor  1  mean by which all weights are divided; the weights' metrics are from
    before the division
[verl | rollout_correction.rollout_rs]
rollout_corr/rollout_rs_{masked|seq_masked}_fraction  share  tokens left out, and responses that lose one
rollout_corr/rollout_rs_{criterion}_{masked|seq_masked}_fraction  share  the same for one criterion
rollout_corr/rollout_rs_{criterion}_{mean|std}  nats  over tokens, of the criterion's value; for std, values beyond a
    threshold are clipped to it
rollout_corr/rollout_rs_{criterion}_{max|min}   nats  of the tokens or responses that it judges
rollout_corr/rollout_rs_{criterion}_fraction_{high|low}  share  tokens or responses that it judges whose value is
    beyond a threshold
rollout_corr/rollout_rs_{criterion}_seq_{mean|max|min|std}  nats  over responses, of the mean value of each (verl's
    std: sample standard deviation)
rollout_corr/rollout_rs_{criterion}_seq_max_deviation  nats  largest distance of such a mean from 0
rollout_corr/rollout_rs_{criterion}_seq_fraction_{high|low}  share  responses whose mean value is beyond a threshold

[verl | recomputed log-probabilities]
training/rollout_probs_diff_{mean|max|std}  probability  over tokens, |probability of the training pass - sampler's|
training/rollout_actor_probs_pearson_corr   1            Pearson correlation of the two over tokens

[own | always]
alarm/{entropy_collapse|entropy_explosion|kl_jump|kl_loss_jump|mismatch_growth|all_uniform}  0 or 1  1 while the step
    looks wrong (monitor/alarms.py)
alarm/{truncation|reward_errors|reward_workers|score_by_length|slow_process}  0 or 1  the same
[own | an evaluation was due, with held-out problems]
alarm/heldout_drop  0 or 1  1 while held-out accuracy is far below the run's best

# Time and devices.

[verl | a batch was trained on]
perf/total_num_tokens  tokens    tokens of the trained sequences, each with its prompt
perf/throughput        tokens/s  total_num_tokens / time_per_step / devices
[verl | always]
perf/time_per_step  s  of the step without evaluation and saving
[own | always]
perf/goodput  share  time of the steps that count / time since the run's first start
[own | a batch was trained on]
perf/forward_tflop  10^12 operations  of one forward pass over the trained sequences (step_metrics.py)
perf/update_efficiency  share  of the policy's update, the operations that its mini-batches need: without padding, and
    each prompt once (docs/update.md)
[own | groups were sampled]
perf/{decode|prefill}_efficiency  share  of the sampler's operations, those that its tokens need: by rows that have not
    ended and keys that exist, and each prompt once (docs/rollout.md)
[own | groups were sampled, with reward.model.path]
perf/reward_model_efficiency  share  of the reward model's operations, those that its conversations need: without
    padding and with causal attention (docs/algorithms.md)
[verl | the device's peak is known | accelerator]
perf/mfu/{actor|actor_infer|critic}  share  forward passes (an epoch of updates: 3, adapters 2) x operations / (stage's
    time x devices x peak)
[verl | the device reports it | accelerator]
perf/max_memory_{allocated|reserved}_gb  GiB  peak over the devices of process 0 since the run began
[verl | Linux]
perf/cpu_memory_used_gb  GiB  used memory of process 0's host

[verl | always]
timing_s/step  s  as perf/time_per_step
[verl | groups were sampled]
timing_s/{gen|reward}  s  sampling, and waiting for verdicts
[verl | the step has the stage]
timing_s/{old_log_prob|ref|values|adv|teacher|update_critic|update_actor}  s  stages of training
[verl | they have changed since the last sampling]
timing_s/update_weights  s  laying out the policy's weights for decoding
[own | groups were sampled]
timing_s/{shape|filter}  s  overlong penalty with length reward, and group filter, of all sampled groups
[own | a batch was trained on]
timing_s/batch  s  turning accepted groups into padded rows
[own | always]
timing_s/write  s  writing responses and histograms to disk in process 0, outside the step
[verl | an evaluation was due]
timing_s/testing  s  evaluation, outside the step
[verl | the previous step was saved]
timing_s/save_checkpoint  s  saving the last checkpoint, outside the step; logged in the row of the next step

[verl | a batch was trained on]
timing_per_token_ms/gen  ms  timing_s/gen / all sampled tokens (verl: those of the batch)
[verl | the step has the stage]
timing_per_token_ms/{old_log_prob|ref|values|adv|teacher|update_critic|update_actor}  ms  timing_s /
    perf/total_num_tokens

[Trinity-RFT | groups were sampled]
time/wait_explore_step  s  timing_s/gen + timing_s/reward
time/experience_pipeline/operator/{0_RewardShaping|1_GroupFilter}  s  as timing_s/shape and timing_s/filter, each with
    the wait for its result
[Trinity-RFT | a batch was trained on]
time/train_step  s  sum of the stages of training
time/experience_pipeline/operator/{2_BatchAssembly|3_GroupAdvantage}  s  as timing_s/batch and timing_s/adv; adv waits
    for the advantages
[Trinity-RFT | always]
time/experience_pipeline/write  s  as timing_s/write; there is no experience buffer
time/experience_pipeline/total  s  sum of operators and write, without forward passes
[own | always]
time/lost  s  by restarts until now: each from its checkpoint, with the steps that it repeats, until the run continues
[own | not in the first step after a start | several processes]
time/slowest_process  number  process with the longest seconds of sampling, rewards and update together
time/slowest_process/{sampling|rewards|update}  1  longest seconds of any process / the median one's (of two, the
    shorter), at least 1 s each, without waits for devices and other processes
[Trinity-RFT | an evaluation was due]
time/eval  s  as timing_s/testing
[Trinity-RFT | the previous step was saved]
time/save_checkpoint  s  as timing_s/save_checkpoint
[Trinity-RFT | the evaluation command]
time/bench  s  loading and measuring a model

# Evaluation: `eval` in training, `bench` by the command. {task} is a task set, or a held-out data source.

[Trinity-RFT | an evaluation was due]
{eval|bench}/{task}/{score}/mean@{n}  the score's  mean over problems of the mean of the n samples
{eval|bench}/{task}/{score}/std@{n}   the score's  mean over problems of the standard deviation of the n samples
{eval|bench}/{task}/finished_task_count  problems  problems sampled and verified
[Trinity-RFT | evaluation with n above 1; k is 2, 4, 8 ... and n]
{eval|bench}/{task}/{score}/{best|worst}@{k}  the score's  mean over problems of the expected best and worst of k
    samples (evaluation.md)
[verl | the verifier returns pred; k = n, with evaluate.bootstrap each k]
{eval|bench}/{task}/{score}/maj@{k}  the score's  mean over problems of the value of the most frequent answer
[arXiv:2107.03374, eq. 1 | an evaluation was due]
{eval|bench}/{task}/acc/pass@{k}  share  mean over problems of 1 - C(n - c, k) / C(n, k), c samples of acc 1
[verl | evaluate.bootstrap]
{eval|bench}/{task}/{score}/{best|worst|maj}@{k}/bootstrap_std  the score's  mean over problems of the deviation over
    the draws
[Trinity-RFT | monitor.detailed_stats]
{eval|bench}/{task}/{score}/{mean|std|best|worst|maj|pass}@{k}/{mean|max|min|std}  the score's  the same over problems
[own | an evaluation was due]
{eval|bench}/{task}/response_length/{mean|max|min}  tokens     of all samples
{eval|bench}/{task}/response_length/clip_ratio      share      samples of data.max_response_length tokens
{eval|bench}/num_errors                             responses  samples whose verification failed
{eval|bench}/num_missing                            responses  those of them without a verdict: no score counts them
"""

# Of the trained batch, only for TensorBoard and Weights & Biases.
HISTOGRAMS = """
[own | a batch was trained on]
critic/score       reward  score of each response, with overlong penalty and length reward
critic/advantages  1       of each token that is trained on
response_length    tokens  of each response
rollout/logprob    nats    the sampler's, of each token
[own | the policy was updated: a batch was trained on, after trainer.critic_warmup, with a token left in the loss]
actor/ratio        ratio   exp(logprob - old_logprob) of each token trained on in each optimizer step, rounded to
    hundredths; 2 holds everything above
"""
