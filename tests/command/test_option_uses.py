"""Every option is read always, or only with a setting that USES says: one that nothing reads is refused."""

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from config_problems import assert_one, config_with, problems

from dapo_jax.algorithms.advantages import ESTIMATORS, cpo
from dapo_jax.algorithms.aggregation import MODES, token_weights
from dapo_jax.algorithms.cpo import CPO_METHODS
from dapo_jax.algorithms.policy_loss import LOSSES
from dapo_jax.algorithms.token_selection import SELECTIONS
from dapo_jax.command.option_uses import CPO_READS, MEASURED, USES, VERIFIED, put_back, unread, without_switched_off
from dapo_jax.command.validation import BOUNDS, validate
from dapo_jax.config.sections import Config, FilterGroupsConfig, PolicyLossConfig
from dapo_jax.config.values import DEFAULTS, with_values
from dapo_jax.dynamic_sampling.group_filter import RULES, group_statistics, keep_groups

FILTER, CORRECTION = "algorithm.filter_groups", "algorithm.rollout_correction"
ALIASES = "dapo_jax.config.freeze, which carries out the names of other trainers"

# An option that is added goes here, or into USES.
ALWAYS_READ = set(
    """
    actor.entropy_coeff actor.grad_clip actor.logprob_chunk_size actor.loss_agg_mode actor.old_logprob
    actor.optim.betas actor.optim.eps actor.optim.lr actor.optim.lr_scheduler_type actor.optim.lr_warmup_steps
    actor.optim.moments_dtype actor.optim.offload actor.optim.optimizer actor.optim.weight_decay
    actor.policy_loss.loss_mode actor.ppo_epochs actor.ppo_mini_batch_size actor.use_dynamic_bsz actor.use_kl_loss
    algorithm.adv_estimator algorithm.distillation.path algorithm.filter_groups.enable algorithm.overlong_filtering
    algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_rs algorithm.use_kl_in_reward
    algorithm.top_entropy_quantile actor.off_policy_mask_threshold
    data.chat_template_kwargs data.curriculum.enable data.filter_overlong_prompts data.max_prompt_length
    data.max_response_length data.shuffle data.system_prompt data.task data.train_batch_size evaluate.tasks
    mesh.data mesh.fsdp mesh.tensor mesh.train_tensor model.attention model.dtype
    model.enable_gradient_checkpointing model.lora.rank model.router_replay
    model.path monitor.alarms.entropy_collapse monitor.alarms.entropy_explosion monitor.alarms.kl_jump
    monitor.alarms.mismatch_growth monitor.alarms.reward_errors monitor.alarms.truncation monitor.console
    monitor.alarms.score_by_length monitor.num_samples
    reward.functions reward.length.form reward.memory_limit_mb reward.model.path reward.num_workers
    reward.overlong_buffer.enable reward.timeout_s rollout.decode_chunk_length rollout.engine rollout.max_num_seqs
    rollout.min_response_length rollout.n rollout.segment_length rollout.stop rollout.temperature rollout.top_k
    rollout.top_p seed
    trainer.best_metric trainer.checkpoint_dir trainer.compilation_cache_dir trainer.compiler_options
    trainer.coordinator trainer.gpu_memory_fraction trainer.heartbeat_timeout_s trainer.max_ckpt_to_keep
    trainer.max_nonfinite_steps trainer.num_processes trainer.process_id trainer.profile_steps trainer.resume_from_path
    trainer.checkpoint_timeout_s trainer.resume_mode trainer.rollout_ahead trainer.save_freq trainer.save_minutes
    trainer.stopped_exit_code trainer.logger trainer.total_epochs trainer.total_training_steps
    trainer.val_before_train workdir
""".split()
)
OTHER_RULES = {  # validate has a rule of their own for where they are not read, or they then say what is so anyway
    f"{CORRECTION}.rollout_rs_threshold",
    "actor.share_prompts",
}

LOSS = "actor.policy_loss.loss_mode"
FILES = {"data.task": "files", "data.train_files": ("a.parquet",)}
GAE = {"algorithm.adv_estimator": "gae"}
NOTHING_MEASURED = {"data.arithmetic.num_heldout": 0}
SEGMENTS = {
    "rollout.segment_length": 512,
    f"{FILTER}.leftover": "carry",
    f"{FILTER}.leftover_max_staleness": 2,
}
DISTILLED = {"algorithm.distillation.path": "models/teacher", f"{FILTER}.enable": False}
CPO = {"algorithm.adv_estimator": "cpo"}
GDPO = {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ("score",)}
WEIGHTED = {f"{CORRECTION}.rollout_is": "token", "actor.old_logprob": "recompute"}
JUDGED = {
    "reward.functions": '{"a": "gsm8k", "b": "judge"}',
    "reward.judge.base_url": "http://localhost:8000/v1",
    "reward.judge.model": "grader",
    "reward.judge.price_per_million_input_tokens": 1.0,
}
# For each setting of USES: changes of the config with which the options are not read, and with which they are.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reward.functions={}": ({"reward.functions": '{"a": "gsm8k"}'}, {}),
    "data.task=files": ({}, FILES),
    "data.task=files or evaluate.tasks": ({}, {"evaluate.tasks": '{"a": {"files": "a.parquet"}}'}),
    "data.task=arithmetic": (FILES, {}),
    "data.task=reasoning_gym": ({}, {"data.task": "reasoning_gym"}),
    "data.curriculum.enable=True": ({}, {"data.curriculum.enable": True}),
    "data.filter_overlong_prompts=False": ({"data.filter_overlong_prompts": True}, {}),
    "model.enable_gradient_checkpointing=True": ({"model.enable_gradient_checkpointing": False}, {}),
    "model.lora.rank above 0": ({}, {"model.lora.rank": 4}),
    "model.path=random": ({"model.path": "models/some"}, {}),
    "rollout.max_num_seqs=0 or rollout.engine=slots": ({"rollout.max_num_seqs": 64}, {"rollout.engine": "slots"}),
    "rollout.segment_length=0": (SEGMENTS, {}),
    VERIFIED: ({"reward.function": "none", "reward.model.path": "a", f"{FILTER}.metric": "score"}, {}),
    "reward.model.path": ({}, {"reward.model.path": "models/reward"}),
    "the verifier format in reward.function or functions": ({}, {"reward.functions": '{"a": "gsm8k", "b": "format"}'}),
    "the verifier judge in reward.function or functions": ({}, JUDGED),
    "reward.length.form other than none": ({}, {"reward.length.form": "group"}),
    "reward.length.form=cosine": ({"reward.length.form": "group"}, {"reward.length.form": "cosine"}),
    "reward.overlong_buffer.enable=True": ({}, {"reward.overlong_buffer.enable": True}),
    "algorithm.adv_estimator=gdpo": ({}, GDPO),
    "algorithm.adv_estimator=grpo or dapo or grpo_passk or gdpo or cpo": ({"algorithm.adv_estimator": "rloo"}, {}),
    "algorithm.adv_estimator=reinforce_plus_plus or gae": ({}, {"algorithm.adv_estimator": "reinforce_plus_plus"}),
    "algorithm.adv_estimator=gae": ({}, GAE),
    "algorithm.adv_estimator=grpo or dapo": ({"algorithm.adv_estimator": "rloo"}, {}),
    "keep_pos_ratio or keep_neg_ratio below 1": ({}, {"algorithm.keep_neg_ratio": 0.5}),
    "algorithm.use_kl_in_reward=True": ({}, {"algorithm.use_kl_in_reward": True}),
    "algorithm.kl_ctrl.type=adaptive": ({}, {"algorithm.kl_ctrl.type": "adaptive"}),
    f"{CORRECTION}.rollout_is=token or sequence": ({}, WEIGHTED),
    f"{CORRECTION}.rollout_is=token or sequence, or actor.old_logprob=auto": ({"actor.old_logprob": "rollout"}, {}),
    "algorithm.adv_estimator=cpo": ({}, CPO),
    f"{FILTER}.enable=True": ({f"{FILTER}.enable": False}, {}),
    f"{FILTER}.rule=std": ({f"{FILTER}.rule": "mixed"}, {}),
    f"{FILTER}.rule=mean_range": ({}, {f"{FILTER}.rule": "mean_range"}),
    "rollout.n=1": ({}, {"rollout.n": 1}),
    f"{FILTER}.adaptive_limit.enable=True": ({}, {f"{FILTER}.adaptive_limit.enable": True}),
    f"a limit of rounds ({FILTER}.max_num_gen_batches above 0, or adaptive_limit)": (
        {f"{FILTER}.max_num_gen_batches": 0},
        {},
    ),
    f"a partial step ({FILTER}.on_limit=partial or on_exhausted=partial)": ({}, {f"{FILTER}.on_exhausted": "partial"}),
    f"{FILTER}.leftover=carry": ({}, {f"{FILTER}.leftover": "carry"}),
    f"{FILTER}.backfill=stream": ({}, {f"{FILTER}.backfill": "stream"}),
    f"{FILTER}.skip_uniform.enable=True": ({}, {f"{FILTER}.skip_uniform.enable": True}),
    "actor.use_dynamic_bsz=True": ({"actor.use_dynamic_bsz": False}, {}),
    "actor.ppo_max_token_len_per_device=None": ({"actor.ppo_max_token_len_per_device": 65536}, {}),
    "loss_agg_mode=seq-mean-token-sum-norm": ({}, {"actor.loss_agg_mode": "seq-mean-token-sum-norm"}),
    "a loss_agg_mode of sequences (seq-mean-...)": ({}, {"actor.loss_agg_mode": "seq-mean-token-sum"}),
    "actor.use_kl_loss=True": ({}, {"actor.use_kl_loss": True}),
    "actor.use_kl_loss=True or algorithm.use_kl_in_reward=True": ({}, {"actor.use_kl_loss": True}),
    "algorithm.distillation.path": ({}, DISTILLED),
    "algorithm.distillation.form=top_k": (DISTILLED, {**DISTILLED, "algorithm.distillation.form": "top_k"}),
    "actor.optim.lr_scheduler_type=cosine": ({}, {"actor.optim.lr_scheduler_type": "cosine"}),
    "critic.optim.lr_scheduler_type=cosine": ({}, {"critic.optim.lr_scheduler_type": "cosine"}),
    MEASURED: (NOTHING_MEASURED, {}),
    f"trainer.best_metric, or {MEASURED}": (NOTHING_MEASURED, {}),
    "'wandb' or FILE.py:Class in trainer.logger": ({}, {"trainer.logger": ("console", "wandb")}),
    "trainer.rollout_ahead=1": ({}, {"trainer.rollout_ahead": 1}),
    "trainer.rollout_ahead=0": ({"trainer.rollout_ahead": 1}, {}),
    "a temperature above 0": ({"evaluate.temperature": 0.0}, {}),
    **{  # which losses read an option, their signatures say: see FUNCTIONS
        use.setting: ({LOSS: "gpg"}, {LOSS: use.setting.removeprefix(f"{LOSS}=").partition(" or ")[0]})
        for use in USES
        if use.setting.startswith(f"{LOSS}=")
    },
    **{
        f"algorithm.cpo.wrap_method={' or '.join(methods)}": (
            {"algorithm.cpo.wrap_method": "mi" if "mi" not in methods else "seq_kl"},
            {"algorithm.cpo.wrap_method": methods[0]},
        )
        for methods in (
            ["mi", "mi_clamp_unify_difficulty"],
            ["mi_clamp_unify_difficulty"],
            ["seq_kl", "negonly_seq_kl"],
            ["mi_clamp_unify_difficulty", "negonly_mi3"],
        )
    },
}
VALUES = {  # valid ones, where the rule below does not give one
    "actor.optim.min_lr_ratio": 0.1,
    "critic.optim.min_lr_ratio": 0.1,
    "actor.loss_scale_factor": 100.0,
    "critic.ppo_mini_batch_size": 64,
    "actor.ppo_max_token_len_per_device": 65536,
    "critic.ppo_micro_batch_size_per_device": 16,
    "critic.optim.betas": (0.8, 0.9),
    "reference.path": "models/other",
    "critic.model.path": "models/other",
    "trainer.project_name": "math",
    "trainer.experiment_name": "first",
    "reward.error_score": -2.0,
    "reward.format.pattern": "Answer: .*",
    "reward.judge.base_url": "https://example.org/v1",
    "reward.judge.model": "other",
    "reward.judge.api_key_env": "KEY",
    "reward.judge.template": "Grade {response}",
    "reward.judge.extra_body": '{"top_p": 1}',
    "reward.function": "gsm8k",
    "data.truncation": "left",
    "data.prompt_key": "question",
    "data.train_files": ("b.parquet",),
    "data.val_files": ("b.parquet",),
    "data.gen_batch_size": 1024,
    "data.reasoning_gym.datasets": ("gcd",),
    "model.lora.target_modules": ("q_proj",),
    "algorithm.keep_pos_ratio": 0.5,
    "algorithm.keep_neg_ratio": 0.5,
    f"{FILTER}.on_limit": "partial",
    f"{FILTER}.on_empty": "skip_step",
    f"{FILTER}.metric": "score",
    "algorithm.distillation.temperature": 0.5,
    "algorithm.gdpo_reward_keys": ("acc",),
    "algorithm.gdpo_reward_weights": (2.0,),
    "algorithm.gamma": 0.9,
    "algorithm.lam": 0.9,
    f"{FILTER}.filter_high": 0.9,
    f"{CORRECTION}.rollout_is_threshold": "5.0",
    "model.random.num_heads": 8,
    "model.random.num_kv_heads": 4,
    "model.random.head_dim": 8,
    "trainer.critic_warmup": 2,
    "trainer.test_freq": 5,
    "monitor.alarms.heldout_drop": 0.4,
    "evaluate.top_k": 5,
    "evaluate.max_prompts": 5,
    "data.reasoning_gym.template": "{question}",
    "data.arithmetic.operators": "*",
    "data.arithmetic.template": "{a}{operator}{b}",
}


def other_value(key: str) -> Any:
    """A valid value that is not the default."""
    default = DEFAULTS[key]
    if key in VALUES:
        return VALUES[key]
    if isinstance(default, bool):
        return not default
    choices = [choice for name, bound in BOUNDS if name == key for choice in bound.choices]
    if choices:
        return next(choice for choice in choices if choice != default)
    if isinstance(default, int):
        return default * 2 if default > 1 else default + 1
    if isinstance(default, float):
        return default / 2 or 0.25
    raise AssertionError(f"{key} needs a line in VALUES")


WALK = [(use, key) for use in USES for key in use.keys if use.setting != ALIASES]


def test_every_option_is_read_always_or_has_its_setting():
    conditional = {key for use in USES for key in use.keys}
    parts = (conditional, ALWAYS_READ, OTHER_RULES)
    assert sorted(key for part in parts for key in part) == sorted(DEFAULTS)


@pytest.mark.parametrize(("use", "key"), WALK, ids=lambda value: value if isinstance(value, str) else value.setting)
def test_an_option_is_refused_where_it_is_not_read_and_accepted_where_it_is(use, key):
    value, others = other_value(key), {}
    for other in USES:
        if key in other.keys and other is not use:
            others |= SETTINGS[other.setting][1]
    off, on = SETTINGS[use.setting]
    assert problems({**others, **on, key: value}) == []
    found = problems({**others, **off, key: value})
    default = "null" if DEFAULTS[key] is None else repr(DEFAULTS[key])
    expected = f"{key}={value!r} is not read without {use.setting}: set that, or leave it at its default, {default}"
    assert expected in found
    rest = [line for line in found if line != expected]  # of others, which are not read for the same reason
    assert problems({**others, **off, key: DEFAULTS[key]}) == rest
    assert all("is not read without" in line for line in rest)


def test_the_running_keep_rate_is_read_without_a_stream():
    assert problems({f"{FILTER}.stream.keep_rate_prior": 0.9, f"{FILTER}.stream.keep_rate_ema": 0.5}) == []
    slack = problems({f"{FILTER}.stream.slack": 2.0})
    assert_one(slack, "stream.slack=2.0 is not read without algorithm.filter_groups.backfill=stream")


def test_a_value_that_says_what_is_so_is_no_error():
    for changes in (
        {"algorithm.kl_ctrl.kl_coef": 0.0},
        {"actor.kl_loss_coef": 0.0},
        {**NOTHING_MEASURED, "trainer.test_freq": -1, "trainer.keep_best_ckpt": 0},
        {"actor.share_prompts": False, "model.attention": "splash"},
    ):
        assert problems(changes) == []


@pytest.mark.parametrize("criterion", ["token_k3", "seq_mean_k2", "token_k1"])
def test_only_k1_has_a_lower_bound(criterion):
    changes = {f"{CORRECTION}.rollout_rs": (criterion,), "actor.old_logprob": "recompute"}
    found = problems({**changes, f"{CORRECTION}.rollout_rs_threshold": ("0.5_2.0",)})
    if criterion == "token_k1":
        assert found == []
    else:
        assert_one(found, f"rollout_rs_threshold=.*{criterion} has no lower bound, so 0.5 is not read: give '2.0'")
    assert problems({**changes, f"{CORRECTION}.rollout_rs_threshold": ("2.0",)}) == []


FUNCTIONS = {  # option -> the functions that may have it as a parameter, by the value of their key
    "algorithm.adv_estimator": (ESTIMATORS,),
    LOSS: (LOSSES, SELECTIONS),
}


@pytest.mark.parametrize("key", FUNCTIONS)
def test_what_functions_have_as_parameters_is_read_with_them_alone(key):
    sections = ("algorithm", "algorithm.cpo", "actor", "actor.policy_loss")
    names = {option.rpartition(".")[2]: option for option in DEFAULTS if option.rpartition(".")[0] in sections}
    tables = FUNCTIONS[key]
    parameters = {
        mode: {name for table in tables if mode in table for name in inspect.signature(table[mode]).parameters}
        for mode in tables[0]
    }
    options = {names[name]: name for found in parameters.values() for name in found if name in names}
    assert len(options) >= 9
    for mode, found in parameters.items():
        for option, name in options.items():
            config = with_values(config_with({}), {key: mode, option: other_value(option)})
            setting = unread(config).get(option, "")
            if "algorithm.cpo.wrap_method" not in setting:  # of which the next test is
                assert bool(setting) == (name not in found), (mode, option)


@pytest.mark.parametrize("method", CPO_METHODS)
def test_each_method_of_cpo_reads_what_the_table_says(method):
    generator = np.random.default_rng(0)
    rewards = np.zeros((6, 4), np.float32)
    rewards[[0, 1, 2], -1] = 1.0  # the first group is all right, the second mixed, the third all wrong
    options = {name: value for name, value in vars(Config().algorithm.cpo).items() if name != "wrap_method"}

    def advantages(**changes: float) -> np.ndarray:
        return np.asarray(
            cpo(
                jnp.asarray(rewards),
                jnp.ones((6, 4), bool),
                jnp.arange(6) // 2,
                num_groups=3,
                norm_adv_by_std_in_grpo=True,
                logprobs=jnp.asarray(-generator_draws[0]),
                hint_logprobs=jnp.asarray(-generator_draws[1]),
                entropy=jnp.asarray(generator_draws[2]),
                vocab_size=64,
                wrap_method=method,
                **{**options, **changes},
            )[0]
        )

    generator_draws = generator.uniform(0.1, 4.0, (3, 6, 4)).astype(np.float32)
    changed = {name for name in options if not np.array_equal(advantages(), advantages(**{name: options[name] / 2}))}
    assert changed == set(CPO_READS[method])


def test_each_rule_of_the_filter_reads_what_the_table_says():
    values = jnp.array([0.0, 0.0, 0.0, 1.0, 0.95, 1.0, 1.0, 1.0, 0.4, 0.5])  # groups of two
    statistics = group_statistics(values, jnp.arange(10) // 2, num_groups=5)
    options = {"std_threshold": 0.1, "filter_low": 0.5, "filter_high": 0.96}
    for name in RULES:
        kept = keep_groups(statistics, FilterGroupsConfig(rule=name))
        reads = {
            option
            for option, value in options.items()
            if not jnp.array_equal(kept, keep_groups(statistics, FilterGroupsConfig(rule=name, **{option: value})))
        }
        config = with_values(Config(), {f"{FILTER}.rule": name, **{f"{FILTER}.{key}": options[key] for key in options}})
        assert reads == {option for option in options if f"{FILTER}.{option}" not in unread(config)}, name


def test_each_mean_of_the_loss_reads_what_the_table_says():
    mask, groups = jnp.array([[True, True], [False, False]]), jnp.zeros(2, jnp.int32)
    for mode in MODES:
        weights = token_weights(mask, groups, mode)
        reads = {
            "actor.loss_scale_factor": token_weights(mask, groups, mode, scale_factor=2.0),
            "actor.count_empty_sequences": token_weights(mask, groups, mode, num_sequences=2),
        }
        config = with_values(
            Config(),
            {
                "actor.loss_agg_mode": mode,
                "actor.loss_scale_factor": 2.0,
                "actor.count_empty_sequences": True,
            },
        )
        for key, changed in reads.items():
            assert (key in unread(config)) == bool(jnp.array_equal(weights, changed)), (mode, key)


def test_an_alias_that_was_not_carried_out_is_refused():
    for key in next(use.keys for use in USES if use.setting == ALIASES):
        config = with_values(config_with({}), {key: 1})
        assert unread(config) == {key: ALIASES}
    with pytest.raises(ValueError, match="use_dynamic_sample=True is not read without dapo_jax.config.freeze"):
        validate(with_values(config_with({}), {"algorithm.use_dynamic_sample": True}))


def test_what_a_variation_switches_off_is_back_at_its_default_and_said():
    recipe = config_with({f"{FILTER}.leftover": "carry", f"{FILTER}.leftover_max_staleness": 2, "algorithm.lam": 0.9})
    off = with_values(recipe, {f"{FILTER}.enable": False, f"{FILTER}.metric": "score"})
    chosen = {f"{FILTER}.enable", f"{FILTER}.metric"}
    config, lines = without_switched_off(recipe, off, chosen), put_back(recipe, off, chosen)
    groups = config.algorithm.filter_groups
    assert (groups.enable, groups.leftover, groups.leftover_max_staleness) == (False, "requeue", 1)
    assert len(lines) == 2
    assert f"{FILTER}.leftover is not read without {FILTER}.enable=True: it is back at its default, 'requeue'" in lines
    refused = unread(config)  # what was chosen with the variation, and what the recipe had set in vain
    assert set(refused) == {f"{FILTER}.metric", "algorithm.lam"}


def test_a_variation_that_switches_nothing_off_is_as_it_is():
    recipe = config_with({})
    longer = with_values(recipe, {"trainer.total_training_steps": 7})
    chosen = {"trainer.total_training_steps"}
    assert without_switched_off(recipe, longer, chosen) is longer and put_back(recipe, longer, chosen) == ()


def test_a_config_of_wrong_types_is_left_to_the_check_of_types():
    wrong = with_values(config_with({}), {"rollout.n": None, "algorithm.lam": 0.5})
    assert without_switched_off(config_with({}), wrong, ()) is wrong


def test_the_defaults_are_those_of_the_config():
    assert vars(PolicyLossConfig()) == {
        key.rpartition(".")[2]: value for key, value in DEFAULTS.items() if key.startswith("actor.policy_loss.")
    }
