"""Host: the lines of dynamic sampling are those that users' scripts parse, and agree with the metrics."""

import re

import pytest

from dapo_jax.config.sections import FilterGroupsConfig
from dapo_jax.monitor.filter_log import log_enough, log_round, rule_words
from dapo_jax.monitor.log import close_logging, setup_logging
from dapo_jax.monitor.records import RunRecords, read_metrics


# The users' own script, unchanged: what it reads from train.log has to stay right.
def parse_filter_logs(log_file):
    """解析训练日志，提取 FilterGroup 相关信息"""

    filter_stats = {
        "batches": [],
        "filter_rates": [],
        "kept_prompts": [],
    }

    with open(log_file) as f:
        for line in f:
            # 提取生成批次信息
            if "Generated batch" in line:
                match = re.search(r"Generated batch (\d+)", line)
                if match:
                    batch_num = int(match.group(1))
                    filter_stats["batches"].append(batch_num)

            # 提取过滤率
            if "Filtered" in line and "std=0" in line:
                match = re.search(r"(\d+) \((\d+\.\d+)%\)", line)
                if match:
                    filtered_count = int(match.group(1))  # noqa: F841
                    filter_rate = float(match.group(2)) / 100
                    filter_stats["filter_rates"].append(filter_rate)

            # 提取保留的提示数
            if "Kept" in line and "std>0" in line:
                match = re.search(r"(\d+) prompts", line)
                if match:
                    kept_count = int(match.group(1))
                    filter_stats["kept_prompts"].append(kept_count)

    return filter_stats


def log_step(kept_of_rounds, *, num_prompts, num_samples, target, step=42, mean_std=0.246):
    for round_number, num_kept in enumerate(kept_of_rounds, start=1):
        log_round(
            step=step,
            round_number=round_number,
            num_prompts=num_prompts,
            num_samples=num_samples,
            metric="acc",
            num_kept=num_kept,
            mean_std=mean_std,
            num_accumulated=sum(kept_of_rounds[:round_number]),
            target=target,
        )
    log_enough(target * num_samples)


def messages(workdir):
    return [line.split("INFO: ")[1] for line in (workdir / "train.log").read_text().splitlines()]


@pytest.fixture(autouse=True)
def train_log(tmp_path):
    setup_logging(tmp_path, detailed=False)
    yield
    close_logging()


def test_lines_of_a_group_filter_round(tmp_path):
    log_step([404, 630], num_prompts=1024, num_samples=8, target=1024)
    lines = [line for line in messages(tmp_path) if not line.startswith("[Dynamic Sampling]")]
    assert lines == [
        "Generated batch 1, 1024 prompts, 8192 trajectories",
        "Filter groups enabled, metric=acc",
        "Computing metric std for 1024 prompts...",
        "Filter statistics: Total prompts: 1024",
        "Filtered (std=0): 620 (60.5%)",
        "Kept (std>0): 404 prompts (39.5%)",
        "Mean std: 0.246",
        "Accumulated prompts: 404 / 1024",
        "num_prompt_in_batch=404 < prompt_bsz=1024",
        "num_gen_batches=1. Keep generating...",
        "Generated batch 2, 1024 prompts, 8192 trajectories",
        "Filter groups enabled, metric=acc",
        "Computing metric std for 1024 prompts...",
        "Filter statistics: Total prompts: 1024",
        "Filtered (std=0): 394 (38.5%)",
        "Kept (std>0): 630 prompts (61.5%)",
        "Mean std: 0.246",
        "Accumulated prompts: 1034 / 1024",
        "num_prompt_in_batch=1034 >= prompt_bsz=1024",
        "Collected enough data. Taking first 8192 trajectories.",
    ]


def test_lines_of_a_dynamic_sampling_step(tmp_path):
    log_step([45, 62, 50], num_prompts=128, num_samples=16, target=128)
    lines = [line for line in messages(tmp_path) if line.startswith("[Dynamic Sampling]")]
    assert lines == [
        "[Dynamic Sampling] Step 42, Gen batch 1: Kept 45/128 prompts (filtered 1328 trajectories), "
        "Accumulated: 45/128",
        "[Dynamic Sampling] Need more prompts, fetching next batch...",
        "[Dynamic Sampling] Step 42, Gen batch 2: Kept 62/128 prompts (filtered 1056 trajectories), "
        "Accumulated: 107/128",
        "[Dynamic Sampling] Need more prompts, fetching next batch...",
        "[Dynamic Sampling] Step 42, Gen batch 3: Kept 50/128 prompts (filtered 1248 trajectories), "
        "Accumulated: 157/128",
        "[Dynamic Sampling] Accumulated enough prompts, proceeding with 2048 trajectories",
    ]


def test_last_round_below_the_target_promises_no_further_one(tmp_path):
    log_round(
        step=1,
        round_number=3,
        num_prompts=10,
        num_samples=4,
        metric="acc",
        num_kept=2,
        mean_std=0.1,
        num_accumulated=5,
        target=8,
        last=True,
    )
    text = "\n".join(messages(tmp_path))
    assert "num_prompt_in_batch=5 < prompt_bsz=8" in text
    assert "Keep generating" not in text and "Need more prompts" not in text


@pytest.mark.parametrize("num_kept, rate", [(10, 0.0), (4, 0.6), (0, 1.0)])
def test_parser_reads_whole_percentages(tmp_path, num_kept, rate):
    log_step([num_kept], num_prompts=10, num_samples=4, target=10)
    assert parse_filter_logs(tmp_path / "train.log") == {
        "batches": [1],
        "filter_rates": [rate],
        "kept_prompts": [num_kept],
    }


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
    log_round(
        step=1,
        round_number=1,
        num_prompts=8,
        num_samples=4,
        metric="acc",
        words=words,
        num_kept=2,
        mean_std=0.1,
        num_accumulated=2,
        target=2,
    )
    lines = messages(tmp_path)
    assert f"Filtered ({dropped}): 6 (75.0%)" in lines and f"Kept ({kept}): 2 prompts (25.0%)" in lines
    if rule == "std":
        read = parse_filter_logs(tmp_path / "train.log")
        assert read == {"batches": [1], "filter_rates": [0.75], "kept_prompts": [2]}
    else:
        assert "std=0" not in "".join(lines) and "std>0" not in "".join(lines)


def test_parser_agrees_with_the_metrics(tmp_path):
    steps = {1: [424, 420, 415], 2: [615, 409], 3: [1024]}
    records = RunRecords(tmp_path, resume_step=None)
    for step, kept in steps.items():
        log_step(kept, num_prompts=1024, num_samples=8, target=1024, step=step)
        records.write(
            step,
            {
                "train/num_gen_batches": len(kept),
                "train/num_kept_prompts": sum(kept),
                "train/filter_rate": 1 - sum(kept) / (1024 * len(kept)),
            },
        )
    records.close()

    stats = parse_filter_logs(tmp_path / "train.log")
    assert stats["batches"] == [1, 2, 3, 1, 2, 1]
    start = 0
    for row in read_metrics(tmp_path):
        rounds = slice(start, start + int(row["train/num_gen_batches"]))
        rates = stats["filter_rates"][rounds]
        assert sum(stats["kept_prompts"][rounds]) == row["train/num_kept_prompts"]
        assert sum(rates) / len(rates) == pytest.approx(row["train/filter_rate"], abs=5e-4)
        start = rounds.stop
    assert start == len(stats["batches"]) == len(stats["filter_rates"]) == len(stats["kept_prompts"])
