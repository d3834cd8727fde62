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
POOLS = {"data.curriculum.enable": "True"}
WITHOUT_FILTER = {**NO_FILTER, "trainer.total_training_steps": "60"}  # about as many tokens as 24 steps with a filter
SHOULD_YOU_FILTER = {  # on 48 problems, so that each comes up several times: in the first pass, pools skip none
    "naive GRPO": WITHOUT_FILTER,
    "pools": {**WITHOUT_FILTER, **POOLS},
    "filter": {},
    "filter, carry": {"algorithm.filter_groups.leftover": "carry"},
    "filter, stream": {"algorithm.filter_groups.backfill": "stream"},
    "pools and filter": POOLS,
}
QUESTION = 'How many times does the letter "{}" appear in the text: "{}"?'
LETTERS = "<|im_end|>\n".join(  # after two worked examples, in SmolLM2's format
    (
        QUESTION.format("a", "a banana"),
        "<|im_start|>assistant\n4",
        f"<|im_start|>user\n{QUESTION.format('t', 'the cat ran home')}",
        "<|im_start|>assistant\n2",
        "<|im_start|>user\n{question}",
    )
)
GRPO_24_STEPS = {  # a constant learning rate, so that a longer run begins like a shorter one
    **{key: value for key, value in GRPO.items() if key not in NO_FILTER},
    "actor.optim.lr_scheduler_type": "constant",
    "trainer.total_training_steps": "24",
}
TEACHER = {"algorithm.distillation.path": "runs/quickstart"}  # bash scripts/quickstart.sh trains it
COMPARISONS = {
    "quickstart": Comparison("configs/quickstart.py", {"DAPO": {}}),
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
    ),
    "dapo": Comparison(
        "configs/sums.py",
        dict(zip(PARTS, accumulate(PARTS.values(), lambda above, part: {**above, **part}), strict=True)),
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
    "filter_sums": Comparison(  # prepare_sums.py --num-train 48 --output 'data/sums48/{split}.parquet'
        "configs/sums.py",
        SHOULD_YOU_FILTER,
        shared={
            **GRPO_24_STEPS,
            "data.train_files": "data/sums48/train.parquet",
            "data.val_files": "data/sums48/heldout.parquet",
        },
    ),
    "filter_letters": Comparison(  # needs pip install -e '.[reasoning-gym]'; at first, 9 % of the answers are right
        "configs/sums.py",
        SHOULD_YOU_FILTER,
        shared={
            **GRPO_24_STEPS,
            "data.task": "reasoning_gym",
            "data.reasoning_gym.datasets": "letter_counting",
            "data.reasoning_gym.num_train": "48",
            "data.reasoning_gym.num_heldout": "96",
            "data.reasoning_gym.template": LETTERS,
            "data.max_prompt_length": "256",
            "data.max_response_length": "16",
        },
    ),
}
