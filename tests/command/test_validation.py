import math
import re

import pytest
from config_problems import assert_one, config_with, problems

from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.command.validation import CHOICES as NAMES
from dapo_jax.command.validation import validate
from dapo_jax.command.warnings import warnings
from dapo_jax.config.derived import keeps_some

CHOICES = NAMES | {
    "data.task": ("files", "arithmetic", "reasoning_gym"),
    "data.truncation": ("error", "left", "right", "middle"),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "model.attention": ("xla", "fused", "cudnn", "triton", "splash"),
    "actor.optim.moments_dtype": ("float32", "bfloat16"),
    "critic.optim.moments_dtype": ("float32", "bfloat16"),
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.filter_groups.on_limit": ("error", "partial", "fallback_unfiltered"),
    "algorithm.filter_groups.on_exhausted": ("next_epoch", "partial", "error"),
    "algorithm.filter_groups.on_empty": ("error", "skip_step", "train_unfiltered"),
    "algorithm.filter_groups.leftover": ("requeue", "carry", "discard"),
    "algorithm.filter_groups.backfill": ("batch", "stream"),
    "critic.optim.lr_scheduler_type": ("constant", "cosine"),
    "rollout.engine": ("auto", "waves", "slots"),
    "actor.old_logprob": ("auto", "rollout", "recompute"),
    "actor.optim.lr_scheduler_type": ("constant", "cosine"),
    "trainer.resume_mode": ("auto", "disable"),
    "trainer.best_metric_mode": ("max", "min"),
}
POSITIVE = (
    "data.train_batch_size data.max_prompt_length data.max_response_length rollout.n "
    "rollout.kv_memory_share rollout.decode_chunk_length reward.num_workers reward.timeout_s actor.ppo_mini_batch_size "
    "actor.ppo_micro_batch_size_per_device actor.ppo_epochs "
    "actor.logprob_chunk_size actor.grad_clip "
    "actor.policy_loss.clip_cov_ratio actor.policy_loss.kl_cov_ratio actor.policy_loss.tau_pos "
    "actor.policy_loss.tau_neg algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl algorithm.cpo.cpo_lambda "
    "critic.ppo_epochs critic.cliprange_value "
    "critic.grad_clip reward.model.micro_batch_size_per_device reward.model.max_length "
    "data.reasoning_gym.num_train "
    "trainer.max_ckpt_to_keep trainer.checkpoint_timeout_s mesh.fsdp mesh.tensor "
    "trainer.heartbeat_timeout_s trainer.max_nonfinite_steps actor.optim.eps critic.optim.eps "
    "model.random.hidden_size model.random.intermediate_size model.random.num_layers model.random.num_heads "
    "model.random.num_kv_heads model.random.head_dim"
).split()
NOT_NEGATIVE = (
    "seed actor.entropy_coeff algorithm.kl_ctrl.kl_coef reward.overlong_buffer.penalty_factor monitor.num_samples "
    "data.arithmetic.num_train data.arithmetic.num_heldout model.random.initializer_range "
    "trainer.critic_warmup trainer.rollout_devices trainer.num_processes trainer.save_minutes trainer.stop_patience_s "
    "actor.optim.lr actor.optim.lr_warmup_steps actor.optim.weight_decay "
    "critic.optim.lr critic.optim.lr_warmup_steps critic.optim.weight_decay"
).split()
OFF_OR_POSITIVE = {  # -1 or more than 0: what -1 means
    "trainer.total_training_steps": "as many as trainer.total_epochs says",
    "trainer.save_freq": "only at the end",
    "trainer.test_freq": "only at the end",
    "mesh.data": "what the other axes leave",
}
POSITIVE_OR_NULL = (
    "trainer.total_epochs",
    "data.gen_batch_size",
    "actor.loss_scale_factor",
    "critic.ppo_mini_batch_size",
    "critic.ppo_micro_batch_size_per_device",
)
ALGORITHM, CORRECTION, FILTER = "algorithm", "algorithm.rollout_correction", "algorithm.filter_groups"


def test_a_valid_config_passes_without_a_warning():
    assert problems({}) == [] and warnings(config_with({})) == []


def test_a_memory_limit_is_none_or_positive():
    assert problems({"reward.memory_limit_mb": 0}) == []
    assert_one(problems({"reward.memory_limit_mb": -1}), "reward.memory_limit_mb=-1 must be 0")


@pytest.mark.parametrize("steps", [(0,), (2, 101)])
def test_only_training_steps_can_be_profiled(steps):
    assert problems({"trainer.profile_steps": (1, 100)}) == []
    assert_one(problems({"trainer.profile_steps": steps}), "profile_steps=.* must be training steps, of 1..100")
    assert_one(problems({"trainer.profile_steps": (1.5,)}), "profile_steps=.* must be several values, each an integer")


def test_all_problems_are_reported_together():
    found = problems(
        {
            "data.truncation": "up",
            "rollout.n": 0,
            "actor.clip_ratio_c": 1.0,
            "rollout.top_p": 0.0,
            "data.chat_template_kwargs": "[1]",
            "algorithm.lam": 2.0,
        }
    )
    keys = ("data.truncation", "rollout.n", "actor.clip_ratio_c", "rollout.top_p", "chat_template_kwargs", "lam")
    assert len(found) == len(keys)
    for key in keys:
        assert any(key in line for line in found)


@pytest.mark.parametrize("key", CHOICES)
def test_a_name_that_is_no_choice_is_refused_with_the_list(key):
    choices = re.escape(", ".join(CHOICES[key]))
    assert any(re.search(f"^{key}='other' must be one of {choices}$", line) for line in problems({key: "other"}))


@pytest.mark.parametrize("key", POSITIVE)
def test_what_must_be_positive_is_refused_at_zero(key):
    assert f"{key}=0 must be greater than 0" in [line.replace("=0.0 ", "=0 ") for line in problems({key: 0})]


@pytest.mark.parametrize("value", [0, -8])
@pytest.mark.parametrize("key", POSITIVE_OR_NULL)
def test_what_may_be_null_is_refused_at_zero_and_below(key, value):
    for estimator in ("grpo", "gae"):
        found = [line.replace(".0 ", " ") for line in problems({key: value, "algorithm.adv_estimator": estimator})]
        assert f"{key}={value} must be greater than 0, or null" in found


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.train_batch_size", 500, "must be a multiple of actor.ppo_mini_batch_size"),
        ("rollout.max_num_seqs", 8, "must be at least rollout.n"),
        ("rollout.temperature", 0.0, "no gradient"),
        ("model.path", "", "model.path is empty"),
        ("model.lora.rank", -1, "model.lora.rank=-1 must be 0 (off) or more"),
        ("model.lora.target_modules", ("q_proj", "q_proj"), "each once"),
        ("model.lora.target_modules", ("all-linear", "q_proj"), "must be all-linear, or some of q_proj"),
        ("model.lora.target_modules", ("lm_head",), "must be all-linear, or some of q_proj"),
        ("data.task", "files", "data.train_files is empty"),
        ("evaluate.top_k", 0, "evaluate.top_k"),
        ("evaluate.n", 0, "evaluate.n=0 must be greater than 0"),
        ("evaluate.max_prompts", 0, "or -1 (all problems)"),
        ("evaluate.batch_size", -1, "evaluate.batch_size=-1 must be 0"),
        ("evaluate.tasks", "[", "must be JSON"),
        ("evaluate.tasks", '{"a": {"files": "f", "n": 0}}', "evaluate.tasks.a.n=0 must be greater than 0"),
        ("evaluate.tasks", '{"a": {"files": "f", "top_p": 0}}', "evaluate.tasks.a.top_p=0 must be in (0, 1]"),
        ("actor.clip_ratio_low", 1.5, "1 never clips"),
        ("actor.entropy_coeff", -0.1, "actor.entropy_coeff=-0.1 must be 0 or more"),
        ("algorithm.kl_ctrl.kl_coef", -0.1, "kl_coef=-0.1 must be 0 or more"),
        ("actor.optim.lr", -1e-6, "actor.optim.lr=-1e-06 must be 0 or more"),
        ("critic.optim.lr", -1e-6, "critic.optim.lr=-1e-06 must be 0 or more"),
    ],
)
def test_each_rule_names_key_and_cure(key, value, message):
    assert_one(problems({key: value}), re.escape(message))


def test_segments_need_groups_that_may_wait():
    carry = {f"{FILTER}.leftover": "carry", f"{FILTER}.leftover_max_staleness": 3, "rollout.segment_length": 400}
    assert problems(carry) == []
    assert_one(problems({**carry, f"{FILTER}.leftover_max_staleness": 2}), "must be at least 3: .* 3 training steps")
    assert_one(problems({**carry, "actor.old_logprob": "recompute"}), "cannot be recomputed")
    assert_one(problems({**carry, f"{FILTER}.on_limit": "partial"}), "not read without rollout.segment_length=0")
    found = problems({"rollout.segment_length": 400, f"{FILTER}.backfill": "stream"})
    assert_one(found, "which does not go with algorithm.filter_groups.leftover=requeue, backfill=stream: set .*carry")


def test_a_token_budget_holds_a_prompt_with_its_response():
    budget = {"data.max_prompt_length": 1100, "data.max_response_length": 1000}
    by_rows = {"actor.use_dynamic_bsz": False}
    assert problems({**budget, "actor.ppo_max_token_len_per_device": 2100}) == []
    assert_one(problems({**budget, "actor.ppo_max_token_len_per_device": 2099}), "max_response_length = 2100")
    unread = problems({**by_rows, "actor.ppo_max_token_len_per_device": 8000})
    assert_one(unread, "=8000 is not read without actor.use_dynamic_bsz=True")
    odd = {"data.train_batch_size": 33, "actor.ppo_mini_batch_size": 33, "rollout.n": 5}
    assert_one(problems({**odd, **by_rows}), "must be a multiple of actor.ppo_micro_batch_size_per_device=8")
    assert problems(odd) == []  # a packed pass holds as many tokens, in any number of rows


def test_adapters_have_no_other_reference_than_their_base():
    changes = {"actor.use_kl_loss": True, "reference.path": "elsewhere"}
    assert_one(problems({**changes, "model.lora.rank": 4}), "does not go with model.lora.rank=4")
    assert problems(changes) == []


def test_no_filter_means_one_round_of_the_batch_size():
    off = {f"{FILTER}.enable": False}
    assert_one(problems({**off, "data.gen_batch_size": 1024}), "gen_batch_size=1024 is not read without .*enable=True")
    assert problems({**off, "data.gen_batch_size": 512}) == problems({"data.gen_batch_size": 1024}) == []


@pytest.mark.parametrize("backfill", ["batch", "stream"])  # a stream may sample as many prompts as the rounds
@pytest.mark.parametrize("leftover", ["requeue", "carry"])  # a step that falls short carries nothing to the next
def test_a_limit_that_can_never_fill_a_batch_is_refused(backfill, leftover):
    changes = {"data.gen_batch_size": 32, f"{FILTER}.backfill": backfill, f"{FILTER}.leftover": leftover}
    message = "^data.train_batch_size=512 groups cannot be kept of the 10 x 32 = 320 prompts .*set .*on_limit=partial"
    assert_one(problems(changes), message)
    for cure in (
        {f"{FILTER}.max_num_gen_batches": 16},
        {f"{FILTER}.max_num_gen_batches": 0},
        {"data.gen_batch_size": 52},
        {f"{FILTER}.on_limit": "partial"},
        {f"{FILTER}.on_limit": "fallback_unfiltered"},
        {f"{FILTER}.on_exhausted": "partial"},  # the epoch may end before the limit in every step
        {"data.train_batch_size": 320},
    ):
        assert problems({**changes, **cure}) == []
    assert_one(problems({**changes, f"{FILTER}.max_num_gen_batches": 15}), "15 x 32 = 480")


def test_a_stream_may_aim_at_less_than_it_needs():
    stream = {f"{FILTER}.backfill": "stream"}
    assert problems({**stream, f"{FILTER}.stream.slack": 0.75}) == []
    assert_one(problems({**stream, f"{FILTER}.stream.slack": 0.0}), "stream.slack=0.0 must be greater than 0")


def test_a_kl_loss_has_a_coefficient():
    changes = {"actor.kl_loss_coef": 0.0}
    assert_one(problems({**changes, "actor.use_kl_loss": True}), "actor.kl_loss_coef=0.0 must be greater than 0")
    assert problems(changes) == []  # it says what is so


def test_overlong_buffer_must_fit_in_the_response():
    changes = {"reward.overlong_buffer.len": 2000}
    assert_one(problems({**changes, "reward.overlong_buffer.enable": True}), "overlong_buffer.len=2000 must be in 1..")
    assert_one(problems(changes), "overlong_buffer.len=2000 is not read without reward.overlong_buffer.enable=True")


def test_a_critics_batches_fit_the_training_batch_if_there_is_a_critic():
    for key, message in (
        ("critic.ppo_mini_batch_size", "train_batch_size=512 must be a multiple of critic.ppo_mini_batch_size=7 "),
        ("critic.ppo_micro_batch_size_per_device", "32 x 16 = 512 .* of critic.ppo_micro_batch_size_per_device=7"),
    ):
        assert_one(problems({key: 7, "algorithm.adv_estimator": "gae", "actor.use_dynamic_bsz": False}), message)
        assert_one(problems({key: 7}), f"^{key}=7 is not read without algorithm.adv_estimator=gae")
    own = {"critic.ppo_mini_batch_size": 64, "critic.ppo_micro_batch_size_per_device": 32}
    assert problems({**own, "algorithm.adv_estimator": "gae"}) == []


def test_a_batch_size_that_the_critic_takes_from_the_actor_is_reported_for_both():
    found = problems({"actor.ppo_mini_batch_size": 31, "algorithm.adv_estimator": "gae"})
    assert any("actor.ppo_mini_batch_size=31" in line for line in found)
    assert any("critic.ppo_mini_batch_size=31" in line for line in found)


@pytest.mark.parametrize("name", ["keep_pos_ratio", "keep_neg_ratio", "gamma", "lam"])
def test_shares_and_discounts_are_from_0_to_1(name):
    read = {"algorithm.adv_estimator": "gae"} if name in ("gamma", "lam") else {}
    for value in (-0.1, 1.1):
        assert_one(problems({f"{ALGORITHM}.{name}": value}), rf"^algorithm.{name}={value} must be in \[0, 1\]")
    for value in (0.0, 1.0):
        assert problems({**read, f"{ALGORITHM}.{name}": value}) == []


def test_only_grpo_keeps_some_samples():
    allowed = []
    for estimator in ESTIMATORS:
        for name in ("keep_pos_ratio", "keep_neg_ratio"):
            changes = {"algorithm.adv_estimator": estimator, f"algorithm.{name}": 0.5}
            if estimator == "gdpo":
                changes["algorithm.gdpo_reward_keys"] = ("score",)
            assert keeps_some(config_with(changes).algorithm)
            found = problems(changes)
            if found:
                assert_one(found, f"{name}=0.5 is not read without algorithm.adv_estimator=grpo or dapo")
            else:
                allowed.append(estimator)
    assert set(allowed) == {"grpo", "dapo"}  # two names of one function


BOTH_CORRECTED = {f"{CORRECTION}.rollout_rs": ("token_k1", "seq_mean_k3"), "actor.old_logprob": "recompute"}
WEIGHTED = {f"{CORRECTION}.rollout_is": "token", "actor.old_logprob": "recompute"}
BAND = {f"{CORRECTION}.rollout_rs_threshold": ("0.5_2.0", "0.1")}
POOLS = {"data.curriculum.enable": True}
UNJUDGED = {"reward.function": "none", "reward.model.path": "somewhere"}


@pytest.mark.parametrize(
    ("wrong", "message", "cure"),
    [
        (
            {"algorithm.adv_estimator": "grpo_passk", "rollout.n": 1},
            "grpo_passk needs rollout.n of at least 2, not 1",
            {"rollout.n": 2},
        ),
        (
            {"trainer.critic_warmup": 3},
            "critic_warmup=3 is not read without algorithm.adv_estimator=gae",
            {"algorithm.adv_estimator": "gae"},
        ),
        (
            {f"{CORRECTION}.rollout_is": "token"},
            "set actor.old_logprob=recompute, not auto",
            {"actor.old_logprob": "recompute"},
        ),
        (
            {**BOTH_CORRECTED, **BAND, "actor.old_logprob": "rollout"},
            "set actor.old_logprob=recompute, not rollout",
            {"actor.old_logprob": "recompute"},
        ),
        (
            {**BOTH_CORRECTED, f"{CORRECTION}.rollout_rs_threshold": ("2.0",)},
            r"rollout_rs=\('token_k1', 'seq_mean_k3'\) needs as many rollout_rs_threshold, not \('2.0',\)",
            BAND,
        ),
        (
            {**BOTH_CORRECTED, **BAND, f"{CORRECTION}.rollout_rs": ("token_k1", "seq_max_k1")},
            "rollout_rs='seq_max_k1' must be one of token_k1, .*seq_max_k3",
            BOTH_CORRECTED,
        ),
        (
            {**BOTH_CORRECTED, f"{CORRECTION}.rollout_rs_threshold": ("2.0_0.5", "0.1")},
            "rollout_correction: threshold '2.0_0.5' must be 'high' or 'low_high'",
            BAND,
        ),
        (
            {f"{CORRECTION}.rollout_is_threshold": "-1", **WEIGHTED},
            "rollout_correction: threshold '-1' must be",
            {f"{CORRECTION}.rollout_is_threshold": "5"},
        ),
        (
            {"reward.function": "none", f"{FILTER}.metric": "score"},
            "reward.function=none needs a reward model or a teacher: give reward.model.path, or",
            {"reward.model.path": "somewhere"},
        ),
        (UNJUDGED, "metric=acc is the verifier's.* none: choose score", {f"{FILTER}.metric": "score"}),
        (UNJUDGED, "metric=acc .*set algorithm.filter_groups.enable=False", {f"{FILTER}.enable": False}),
        (
            {**UNJUDGED, f"{FILTER}.metric": "score", **POOLS},
            "the verifier's acc, and reward.function is none",
            {"reward.function": "auto"},
        ),
        ({**POOLS, "rollout.n": 1}, "groups that can be mixed, not rollout.n=1", {"rollout.n": 2}),
        (
            {**POOLS, f"{FILTER}.skip_uniform.enable": True},
            "skip_uniform.enable=True both leave out prompts .*set one of them to False",
            {f"{FILTER}.skip_uniform.enable": False},
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused_until_cured(wrong, message, cure):
    assert_one(problems(wrong), message)
    assert problems({**wrong, **cure}) == []


def test_truncated_sampling_and_single_samples_are_warned_of():
    found = warnings(config_with({"rollout.top_p": 0.9, "rollout.n": 1, "evaluate.n": 1}))
    assert len(found) == 3
    assert_one(warnings(config_with({"rollout.top_k": 20})), "rollout.top_p=1.0, rollout.top_k=20: .* truncated")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {f"{FILTER}.metric": "accuracy"},
            "metric=accuracy is not a number that reward.function=auto returns.*mean acc",
        ),
        ({f"{FILTER}.metric": "acc_reward", "reward.function": "gsm8k"}, "reward.function=gsm8k returns: choose one"),
        ({f"{FILTER}.metric": "overlong"}, "metric=overlong is not a number"),
        ({f"{FILTER}.metric": "reward_model"}, "metric=reward_model is not a number"),
    ],
)
def test_a_filter_metric_that_the_verifier_never_returns_is_refused(changes, message):
    assert_one(problems(changes), message)
    assert problems({**changes, "reward.function": "package.module.function"}) == []
    assert problems({**changes, f"{FILTER}.metric": "seq_final_reward"}) == []
    validate(config_with(changes), training=False)  # no group is filtered: another verifier may measure the run


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ("[1]", "must be a JSON object such as .*by name: correct it"),
        ('{"a": 1', "must be a JSON object such as .*delimiter"),
        ('{"a b": "gsm8k"}', "reward.functions, 'a b' is the name of a metric: .*rename"),
        ('{"a/b": "gsm8k"}', "'a/b' is the name of a metric"),
        ('{"acc": "gsm8k"}', "'acc' is the name of a metric"),
        ('{"overlong": "gsm8k"}', "overlong: these numbers are computed from the score"),
        ('{"a": "none"}', "function='none' must be the name of a verifier.*leave it out"),
        ('{"a": 3}', "'a' must be a function's name, or an object of"),
        ('{"a": {"weight": 3}}', "'a' must be a function's name, or an object of"),
        ('{"a": {"function": "gsm8k", "wieght": 3}}', "'a' must be a function's name, or an object of"),
        ('{"a": {"function": "gsm8k", "weight": true}}', "weight=True must be a finite number"),
        ('{"a": {"function": "gsm8k", "weight": NaN}}', "weight=nan must be a finite number"),
    ],
)
def test_what_reward_functions_must_be(functions, message):
    assert_one(problems({"reward.functions": functions}), message)


SEVERAL = {"reward.functions": '{"correct": "math_dapo", "spelling": {"function": "gsm8k", "weight": 0.5}}'}


def test_a_pattern_of_the_format_must_be_a_regular_expression():
    changes = {"reward.functions": '{"a": "gsm8k", "b": "format"}'}
    message = "reward.format.pattern='.a' must be a regular expression .*correct it"
    assert_one(problems({**changes, "reward.format.pattern": "(a"}), message)


def test_a_length_reward_needs_to_know_what_is_right():
    changes = {"reward.length.form": "group", f"{FILTER}.metric": "score", **UNJUDGED}
    assert_one(problems(changes), "reward.length.form=group needs a verifier")


JUDGED = {
    "reward.function": "judge",
    "reward.judge.base_url": "http://localhost:8000/v1",
    "reward.judge.model": "grader",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_url": ""}, "reward.judge.base_url='' must be the address of an OpenAI-compatible endpoint"),
        ({"base_url": "localhost:8000"}, "base_url='localhost:8000' must be the address"),
        ({"base_url": "http://host:port/v1"}, "base_url must be the address"),
        ({"base_url": "http://me:secret@host/v1"}, "base_url must .* without user, password and parameters"),
        ({"base_url": "http://host/v1?key=secret"}, "base_url must .* without user, password and parameters"),
        ({"model": ""}, "reward.judge.model is empty: give the name"),
        ({"extra_body": "[]"}, "extra_body='..' must be a JSON object"),
        ({"extra_body": "{"}, "extra_body='.' must be a JSON object .*correct it"),
        ({"extra_body": '{"model": "x"}'}, "extra_body=.* without model, which the run sets"),
        ({"max_cost": 1.0}, "reward.judge.max_cost=1.0 needs prices"),
        ({"template": "Grade it\n"}, "template='Grade it..' must have the placeholder {response}"),
    ],
)
def test_what_a_judge_must_be(changes, message):
    assert problems(JUDGED) == []
    found = problems(JUDGED | {f"reward.judge.{name}": value for name, value in changes.items()})
    assert_one(found, message)
    assert "secret" not in str(found)


def test_a_judge_of_a_task_set_needs_its_options_too():
    tasks = {"evaluate.tasks": '{"a": {"files": "a.parquet", "reward_function": "judge"}}'}
    found = problems(tasks)
    assert len(found) == 2 and all("reward.judge." in line for line in found)
    assert problems({**JUDGED, "reward.function": "gsm8k", **tasks}) == []


def test_each_of_several_rewards_can_be_the_filter_metric():
    for metric in ("acc", "score", "correct", "spelling", "seq_reward"):
        assert problems({**SEVERAL, f"{FILTER}.metric": metric}) == []
    wrong = {**SEVERAL, f"{FILTER}.metric": "speling"}
    assert_one(problems(wrong), "metric=speling is not a number that reward.functions=.*mean spelling")
    own = '{"correct": "math_dapo", "format": "FILE.py:format"}'
    assert problems({"reward.functions": own, f"{FILTER}.metric": "format.length"}) == []  # tried at the start


def test_a_filter_on_the_sum_of_several_rewards_warns():
    shaped = {f"{FILTER}.metric": "score"}
    assert_one(
        warnings(config_with({**SEVERAL, **shaped})), "metric=score contains every part.*acc is the first part's"
    )
    assert warnings(config_with(SEVERAL)) == []
    assert warnings(config_with({"reward.functions": '{"correct": "math_dapo"}', **shaped})) == []


SHAPED = {f"{FILTER}.metric": "seq_reward", "reward.overlong_buffer.enable": True}
MEAN_OF_SCORES = {f"{FILTER}.rule": "mean_range", f"{FILTER}.metric": "score", "reward.function": "math_dapo"}


@pytest.mark.parametrize(
    ("unusual", "message", "usual"),
    [
        *(
            (
                {"actor.policy_loss.loss_mode": mode},
                f"loss_mode={mode} is defined with .*seq-mean-token-mean, not token-mean",
                {"actor.loss_agg_mode": "seq-mean-token-mean"},
            )
            for mode in ("gspo", "geo_mean", "sapo")
        ),
        ({"algorithm.adv_estimator": "cpo"}, "cpo has its own contrast", {f"{FILTER}.enable": False}),
        (SHAPED, "metric=seq_reward contains the overlong penalty", {f"{FILTER}.metric": "acc"}),
        (SHAPED, "metric=seq_reward contains the overlong penalty", {f"{FILTER}.enable": False}),
        (
            {f"{FILTER}.metric": "seq_reward", "reward.length.form": "group"},
            "contains the length reward, so groups whose answers are all wrong or all right can pass the filter",
            {f"{FILTER}.metric": "acc"},
        ),
        (
            {f"{FILTER}.metric": "length_reward", "reward.length.form": "cosine"},
            "metric=length_reward contains the length reward",
            {f"{FILTER}.metric": "score"},
        ),
        (SHAPED, "metric=seq_reward contains the overlong penalty", {"reward.overlong_buffer.enable": False}),
        (
            {**SHAPED, f"{FILTER}.metric": "seq_final_reward", "algorithm.use_kl_in_reward": True},
            "metric=seq_final_reward contains the overlong penalty and the KL divergence",
            {f"{FILTER}.metric": "score"},
        ),
        (
            {"trainer.critic_warmup": 100, "algorithm.adv_estimator": "gae", f"{FILTER}.enable": False},
            "critic_warmup leaves no step that updates the policy",
            {"trainer.critic_warmup": 99},
        ),
        *(
            (
                {f"{FILTER}.metric": metric, "algorithm.use_kl_in_reward": True},
                f"metric={metric} contains the KL divergence, so groups whose answers are all wrong can pass",
                usual,
            )
            for metric, usual in (
                ("seq_final_reward", {f"{FILTER}.metric": "acc"}),
                ("token_level_rewards", {f"{FILTER}.enable": False}),
                ("seq_final_reward", {"algorithm.use_kl_in_reward": False}),
            )
        ),
        *(
            (
                {"algorithm.adv_estimator": estimator},
                f"adv_estimator={estimator} compares no samples within a group",
                {f"{FILTER}.enable": False},
            )
            for estimator in ("gae", "reinforce_plus_plus", "remax")
        ),
        ({"rollout.min_response_length": 4}, "min_response_length=4: .* without", {"rollout.min_response_length": 0}),
        ({"evaluate.n": 1}, "evaluate.n=1 .* noisy", {"evaluate.temperature": 0.0}),
        ({"evaluate.temperature": 0.0}, "all samples of a problem are equal", {"evaluate.n": 1}),
        ({"rollout.n": 1}, "rollout.n=1: a group of one", {f"{FILTER}.enable": False}),
        *(
            (MEAN_OF_SCORES, "filter_low=0.01 drops groups that are mostly wrong", usual)
            for usual in (
                {f"{FILTER}.metric": "acc"},
                {f"{FILTER}.filter_low": -0.99},
                {"reward.function": "gsm8k"},
                {f"{FILTER}.rule": "std"},
                {f"{FILTER}.enable": False},
            )
        ),
    ],
)
def test_what_is_rarely_meant_is_allowed_with_a_warning(unusual, message, usual):
    assert problems(unusual) == []
    assert_one(warnings(config_with(unusual)), message)
    assert warnings(config_with({**unusual, **usual})) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.n": None}, "rollout.n=None must be an integer: correct it"),
        ({"actor.optim.lr": None}, "actor.optim.lr=None must be a number"),
        ({"data.shuffle": None}, "data.shuffle=None must be True or False"),
        ({"workdir": None}, "workdir=None must be text"),
        ({"data.train_files": (1,)}, r"data.train_files=\(1,\) must be several values, each text"),
        ({"actor.optim.betas": (0.9,)}, r"actor.optim.betas=\(0.9,\) must be 2 values, each a number"),
        ({"rollout.temperature": math.nan}, "rollout.temperature=nan must be a finite number"),
        ({"actor.clip_ratio_high": math.nan}, "actor.clip_ratio_high=nan must be a finite number"),
        ({"actor.clip_ratio_high": -math.inf}, "actor.clip_ratio_high=-inf must be a finite number"),
        ({"critic.optim.lr": math.inf}, "critic.optim.lr=inf must be a finite number"),
        ({"seed": 2**31}, "seed=2147483648 must be less than"),
    ],
)
def test_a_value_of_another_type_or_no_finite_number_is_refused_once(changes, message):
    assert_one(problems(changes), message)


def test_a_bound_may_be_infinite_and_an_optional_value_null():
    assert problems({"actor.grad_clip": math.inf, "actor.clip_ratio_high": math.inf, "data.gen_batch_size": None}) == []


@pytest.mark.parametrize("key", NOT_NEGATIVE)
def test_what_must_not_be_negative_is_refused_below_zero(key):
    assert any(line.startswith(f"{key}=-1") and "must be 0 or more" in line for line in problems({key: -1}))


@pytest.mark.parametrize("key", OFF_OR_POSITIVE)
def test_minus_one_has_a_meaning_and_zero_has_none(key):
    for value in (0, -2):
        assert_one(problems({key: value}), rf"^{key}={value} must be greater than 0, or -1 \({OFF_OR_POSITIVE[key]}\)$")
    assert problems({"trainer.total_epochs": 1, key: -1}) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.logger": ("console", "mlflow")}, "trainer.logger=.* must be some of console, tensorboard, wandb"),
        ({"trainer.logger": ("wandb", "wandb")}, "trainer.logger=.* must be some of"),
        ({"trainer.logger": (), "monitor.console": "json"}, "monitor.console=json needs 'console' in trainer.logger"),
        (
            {"monitor.filter_log": True, "algorithm.filter_groups.enable": False},
            "monitor.filter_log=True is not read without algorithm.filter_groups.enable=True",
        ),
        (
            {"trainer.project_name": "math"},
            "='math' is not read without 'wandb' or FILE.py:Class in trainer.logger",
        ),
        (
            {"trainer.experiment_name": "a"},
            "='a' is not read without 'wandb' or FILE.py:Class in trainer.logger",
        ),
    ],
)
def test_what_trackers_are_named_is_checked(changes, message):
    assert_one(problems(changes), message)


def test_as_many_steps_as_the_epochs_say_needs_epochs():
    assert_one(problems({"trainer.total_training_steps": -1}), "total_training_steps=-1 needs trainer.total_epochs")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor.optim.betas": (1.0, 0.9)}, "actor.optim.betas=.* must be two numbers in"),
        ({"critic.optim.min_lr_ratio": 1.5}, "critic.optim.min_lr_ratio=1.5 must be in"),
        ({"trainer.process_id": -2}, "trainer.process_id=-2 must be 0 or more, or -1"),
        ({"reward.num_workers": 1025}, "reward.num_workers=1025 must be at most 1024"),
        ({"model.random.num_heads": 3}, "model.random.num_heads=3 must be a multiple of model.random.num_kv_heads=2"),
        ({"model.random.head_dim": 15}, "model.random.head_dim=15 must be even"),
        ({"workdir": ""}, "workdir is empty: name"),
        ({"data.chat_template_kwargs": '{"messages": 1}'}, "must not hold messages, .* leave them out"),
        ({"data.chat_template_kwargs": "[" * 10**5}, "must be a JSON object .maximum recursion"),
    ],
)
def test_a_value_out_of_its_range_is_refused_with_the_rule(changes, message):
    assert_one(problems(changes), message)
