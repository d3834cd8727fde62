"""Host: the comparisons of run_ablation.py: arms that differ from one config in few options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

Options = Mapping[str, str]  # config key -> value, as on the command line


@dataclass(frozen=True)
class Comparison:
    """Training runs of one config, side by side."""

    config: str  # file under configs/
    arms: Mapping[str, Options]  # name -> options of the arm
    shared: Options = field(default_factory=dict)  # options of all arms


NO_FILTER = {"algorithm.filter_groups.enable": "False", "data.gen_batch_size": "6"}
GRPO = {
    **NO_FILTER,
    "algorithm.overlong_filtering": "False",
    "actor.clip_ratio_high": "0.2",
    "reward.overlong_buffer.enable": "False",
    "actor.loss_agg_mode": "seq-mean-token-mean",
}
CLIP_HIGHER = {**GRPO, "actor.clip_ratio_high": "0.28"}
PUNISHMENT = {"reward.overlong_buffer.enable": "True"}
PARTS = {  # DAPO, table 1: each line adds to the one above it
    "naive GRPO": GRPO,
    "+ overlong filtering": {"algorithm.overlong_filtering": "True"},
    "+ clip-higher": {"actor.clip_ratio_high": "0.28"},
    "+ soft overlong punishment": PUNISHMENT,
    "+ token-level loss": {"actor.loss_agg_mode": "token-mean"},
    "+ dynamic sampling": {"algorithm.filter_groups.enable": "True", "data.gen_batch_size": "12"},
}
LENGTH_TERM = {  # every response loses up to 0.3 points, in proportion to its length
    "algorithm.overlong_filtering": "False",
    "reward.overlong_buffer.enable": "True",
    "reward.overlong_buffer.len": "32",
    "reward.overlong_buffer.penalty_factor": "0.3",
}
FILTERS = {
    "no filter": NO_FILTER,
    "filter on the shaped reward": {"algorithm.filter_groups.metric": "seq_reward"},
    "filter on accuracy": {"algorithm.filter_groups.metric": "acc"},
}
SMALL = {  # hundreds of updates in minutes: with the model of small_model.py and a constant learning rate
    **{key: value for key, value in GRPO.items() if key not in NO_FILTER},
    "model.path": "runs/small_model",
    "data.max_prompt_length": "32",
    "data.max_response_length": "28",
    "data.train_batch_size": "12",
    "data.gen_batch_size": "24",
    "rollout.max_num_seqs": "256",
    "actor.optim.lr": "5e-5",
    "actor.optim.lr_scheduler_type": "constant",
    "trainer.total_training_steps": "60",  # of six updates each
    "trainer.test_freq": "10",
    "trainer.save_freq": "60",
}
SMALL_SUMS = {  # dapo-jax data sums --problems 256 256
    **SMALL,
    "data.train_files": "data/sums256/train.parquet",
    "data.val_files": "data/sums256/heldout.parquet",
}
SMALL_SPELLING = {  # needs pip install -e '.[reasoning-gym]'
    **SMALL,
    "data.task": "reasoning_gym",
    "data.reasoning_gym.datasets": "spell_backward",
    "data.reasoning_gym.template": "{question}",
    "data.reasoning_gym.num_train": "256",
    "data.reasoning_gym.num_heldout": "256",
}
SMALL_CARRIES = {**SMALL, **{f"data.{split}_files": f"data/carries/{split}.jsonl" for split in ("train", "val")}}
SMALL_TOO_HARD = {
    **SMALL,
    **{f"data.{split}_files": f"data/too_hard/{split}.jsonl" for split in ("train", "val")},
    "data.max_prompt_length": "40",
    "data.gen_batch_size": "48",
    "trainer.total_training_steps": "24",
    "trainer.test_freq": "8",
}
SMALL_NO_FILTER = {**NO_FILTER, "data.gen_batch_size": "12"}
POOLS = {"data.curriculum.enable": "True"}
WITHOUT_FILTER = {**SMALL_NO_FILTER, "trainer.total_training_steps": "120"}  # about as many tokens as with a filter
SHOULD_YOU_FILTER = {
    "naive GRPO": WITHOUT_FILTER,
    "pools": {**WITHOUT_FILTER, **POOLS},
    "filter": {},
    "filter, carry": {"algorithm.filter_groups.leftover": "carry"},
    "filter, stream": {"algorithm.filter_groups.backfill": "stream"},
    "pools and filter": POOLS,
    "filter, half the batch": {  # so as many updates with as many mixed groups as without a filter
        "data.train_batch_size": "6",
        "data.gen_batch_size": "12",
        "actor.ppo_mini_batch_size": "1",
        "actor.ppo_micro_batch_size_per_device": "8",
        "trainer.total_training_steps": "120",
    },
}
ACTING = {  # each on top of naive GRPO, next to the metric that it is meant to move
    "naive GRPO": {},
    "clip-higher": {"actor.clip_ratio_high": "0.28"},  # entropy
    "token-level loss": {"actor.loss_agg_mode": "token-mean"},  # length
    "overlong filtering": {"algorithm.overlong_filtering": "True"},  # truncation
    "soft overlong punishment": PUNISHMENT,  # truncation
}
LONGER_QUICKSTART = {  # the recipe until it was made to fit five minutes
    "data.arithmetic.high": "50",
    "data.arithmetic.num_heldout": "128",
    "data.max_response_length": "14",
    "rollout.decode_chunk_length": "13",
    "actor.optim.lr": "3e-4",
    "actor.optim.lr_scheduler_type": "cosine",
    "actor.optim.min_lr_ratio": "0.1",
    "trainer.total_training_steps": "38",
    "trainer.test_freq": "19",
    "trainer.save_freq": "19",
}


def boards_of(size: str) -> Options:
    """FrozenLake on boards of a size."""
    splits = {"train_files": "train", "val_files": "heldout"}
    return {f"data.{option}": f"('data/frozen_lake/{size}/{split}.jsonl',)" for option, split in splits.items()}


TEACHER = {"algorithm.distillation.path": "runs/quickstart"}  # bash scripts/quickstart.sh trains it
COMPARISONS = {
    "quickstart": Comparison("configs/quickstart.py", {"DAPO": {}}),
    "calculator": Comparison(  # python configs/calculator.py writes the sums
        "configs/calculator.py", {"with the calculator": {}, "without": {"environment.path": ""}}
    ),
    "frozen_lake": Comparison(  # python configs/frozen_lake.py writes the boards
        "configs/frozen_lake.py",
        {size: boards_of(size) for size in ("2x2", "3x3")}
        | {"4x4": {**boards_of("4x4"), "data.max_response_length": "192"}},
    ),
    "distillation": Comparison(  # accuracy against tokens: a teacher's word on each token, or a verdict on each answer
        "configs/quickstart.py",
        {
            "DAPO": {},
            "teacher alone": {
                **TEACHER,
                "algorithm.distillation.use_task_rewards": "False",
                "algorithm.filter_groups.enable": "False",
            },
            "DAPO and teacher": TEACHER,
        },
        shared=LONGER_QUICKSTART,
    ),
    "dapo": Comparison(
        "configs/sums.py",
        dict(zip(PARTS, accumulate(PARTS.values(), lambda above, part: {**above, **part}), strict=True)),
    ),
    "acting_parts": Comparison(  # so fast a learning rate that clips act, so low a limit that overlong forms do
        "configs/sums.py",
        ACTING,
        shared={
            **SMALL_SUMS,
            **SMALL_NO_FILTER,
            "actor.optim.lr": "2e-4",
            "data.max_response_length": "20",
        },
    ),
    "equal_tokens": Comparison(  # as many tokens as dynamic sampling takes, the schedule of the learning rate included
        "configs/sums.py",
        {
            "naive GRPO, 16 steps": GRPO,
            "naive GRPO, 41 steps": {**GRPO, "trainer.total_training_steps": "41", "trainer.test_freq": "8"},
            "DAPO, 16 steps": {},
        },
    ),
    "learning_rate": Comparison(  # constant; in the other comparisons it decays within 16 steps
        "configs/sums.py",
        {"naive GRPO": GRPO, "DAPO": {}},
        shared={"actor.optim.lr_scheduler_type": "constant"},
    ),
    "mawps": Comparison("configs/mawps.py", {"DAPO": {}}),
    "punishment": Comparison(  # does overlong filtering make the punishment harmful?
        "configs/sums.py",
        {
            "overlong filtering": {**CLIP_HIGHER, "algorithm.overlong_filtering": "True"},
            "punishment": {**CLIP_HIGHER, **PUNISHMENT},
            "both": {**CLIP_HIGHER, **PUNISHMENT, "algorithm.overlong_filtering": "True"},
        },
    ),
    "filter_metric": Comparison("configs/sums.py", FILTERS, shared=LENGTH_TERM),
    "filter_metric_full": Comparison(  # up to a whole point; every right answer still scores above every wrong one
        "configs/sums.py",
        FILTERS,
        shared={
            **LENGTH_TERM,
            "reward.overlong_buffer.penalty_factor": "1.0",
            "actor.ppo_mini_batch_size": "1",
            "actor.ppo_micro_batch_size_per_device": "8",
        },
    ),
    "leftover": Comparison(
        "configs/sums.py",
        {
            "batch, requeue": {},
            "batch, discard": {"algorithm.filter_groups.leftover": "discard"},
            "batch, carry": {"algorithm.filter_groups.leftover": "carry"},
            "stream": {"algorithm.filter_groups.backfill": "stream"},
        },
    ),
    "segments": Comparison(  # partial rollouts; without groups in the first two steps, 18 have as many updates as 16
        "configs/sums.py",
        {
            "whole responses": {},
            "segments of 11 tokens": {
                "rollout.segment_length": "11",
                "algorithm.filter_groups.leftover": "carry",
                "algorithm.filter_groups.leftover_max_staleness": "3",
                "trainer.total_training_steps": "18",
                "trainer.test_freq": "6",
            },
        },
    ),
    "old_logprob": Comparison(
        "configs/sums.py",
        {"auto": {}, "recompute": {"actor.old_logprob": "recompute"}},  # auto: the sampler's, while they agree
    ),
    "dtype": Comparison(
        "configs/sums.py",
        {
            "float32": {},  # what model.dtype=auto is on a CPU
            "bfloat16, rollout": {"model.dtype": "bfloat16", "actor.old_logprob": "rollout"},
            "bfloat16, recompute": {"model.dtype": "bfloat16", "actor.old_logprob": "recompute"},
        },
    ),
    "mini_batches": Comparison(
        "configs/sums.py",
        {f"updates a step: {16 // size}": {"actor.ppo_mini_batch_size": str(size)} for size in (16, 4, 1)},
        shared={
            "data.train_batch_size": "16",
            "data.gen_batch_size": "24",
            "rollout.n": "4",
            "actor.ppo_micro_batch_size_per_device": "4",
        },
    ),
    "filter_sums": Comparison("configs/sums.py", SHOULD_YOU_FILTER, shared=SMALL_SUMS),
    "filter_spelling": Comparison("configs/sums.py", SHOULD_YOU_FILTER, shared=SMALL_SPELLING),
    "filter_carries": Comparison(  # small_model.py --carries writes the sums, of which it solves few
        "configs/sums.py",
        {arm: SHOULD_YOU_FILTER[arm] for arm in ("naive GRPO", "filter, stream")},
        shared=SMALL_CARRIES,
    ),
    "filter_calculator": Comparison(  # python configs/calculator.py writes the sums; about as many tokens in each arm
        "configs/calculator.py",
        {
            "naive GRPO": {
                "algorithm.filter_groups.enable": "False",
                "data.gen_batch_size": "4",
                "trainer.total_training_steps": "8",
            },
            "filter": {"algorithm.filter_groups.max_num_gen_batches": "4"},
        },
    ),
    "filter_too_hard": Comparison(  # small_model.py --too-hard writes them: three of four problems stay unsolved
        "configs/sums.py",
        {
            "naive GRPO": {**SMALL_NO_FILTER, "trainer.total_training_steps": "144", "trainer.test_freq": "24"},
            "filter, stream": {
                **SHOULD_YOU_FILTER["filter, stream"],
                "algorithm.filter_groups.max_num_gen_batches": "0",
            },
        },
        shared=SMALL_TOO_HARD,
    ),
}
