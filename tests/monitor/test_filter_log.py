"""Host: the lines of dynamic sampling are those that users' scripts parse."""

from pathlib import Path

import pytest

from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.monitor.filter_log import log_enough, log_round, rule_words
from dapo_jax.monitor.log import close_logging, setup_logging


def log_step(kept, *, num_prompts, num_samples, target, **changes):
    for number, num_kept in enumerate(kept, start=1):
        values = dict(step=42, round_number=number, num_prompts=num_prompts, num_samples=num_samples, metric="acc")
        values |= dict(num_kept=num_kept, mean_std=0.246, num_accumulated=sum(kept[:number]), target=target)
        log_round(**values | changes)
    log_enough(target * num_samples)


def messages(workdir):
    return [line.split("INFO: ")[1] for line in (workdir / "train.log").read_text().splitlines()]


@pytest.fixture(autouse=True)
def train_log(tmp_path):
    setup_logging(tmp_path, detailed=False)
    yield
    close_logging()


def test_the_lines_of_a_step_are_those_that_are_stored(tmp_path):
    log_step([404, 630], num_prompts=1024, num_samples=8, target=1024)
    assert messages(tmp_path) == (Path(__file__).parent / "data" / "train.log").read_text().splitlines()


def test_last_round_below_the_target_promises_no_further_one(tmp_path):
    log_step([2], num_prompts=10, num_samples=4, target=8, num_accumulated=5, last=True)
    text = "\n".join(messages(tmp_path))
    assert "num_prompt_in_batch=5 < prompt_bsz=8" in text
    assert "Keep generating" not in text and "Need more prompts" not in text


@pytest.mark.parametrize(
    ("rule", "threshold", "dropped", "kept"),
    [
        ("std", 0.0, "std=0", "std>0"),
        ("std", 0.05, "std=0..0.05", "std>0.05"),
        ("mean_range", 0.0, "mean<=0.1 or mean>=0.9", "0.1<mean<0.9"),
        ("mixed", 0.0, "not mixed", "mixed"),
    ],
)
def test_the_lines_say_what_the_rule_says(tmp_path, rule, threshold, dropped, kept):
    words = rule_words(FilterGroupsConfig(rule=rule, std_threshold=threshold, filter_low=0.1, filter_high=0.9))
    log_step([2], num_prompts=8, num_samples=4, target=2, words=words)
    lines = messages(tmp_path)
    assert f"Filtered ({dropped}): 6 (75.0%)" in lines and f"Kept ({kept}): 2 prompts (25.0%)" in lines
    assert sum("std=0" in line for line in lines) == sum("std>0" in line for line in lines) == (rule == "std")
