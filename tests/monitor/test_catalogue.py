"""docs/metrics.md is what runs emit: all that they emit is declared there, and all that is declared is emitted."""

import itertools
import json
import re

import pytest
from metrics_page import CATALOGUE, HISTOGRAMS, METRICS, PAGE, declared, find, matches
from reward_model_files import write_reward_model
from small_families import changes_of, with_tokenizer
from small_run import small_config

from dapo_jax.evaluate.evaluate import bench
from dapo_jax.monitor.records import read_metrics
from dapo_jax.training.loop import train

NEEDS = {"accelerator", "several processes", "data.mixture", "rollout.segment_length", "an endpoint for reward.judge"}
NEEDS |= {"environment.path or tools"}
# Two short runs that have between them every part that emits metrics.
WITH_CRITIC = {
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": True,
    "algorithm.overlong_filtering": True,
    "algorithm.top_entropy_quantile": 0.5,
    "actor.off_policy_mask_threshold": 0.1,
    "actor.old_logprob": "recompute",
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_is_threshold": "0.5_2.0",
    "algorithm.rollout_correction.rollout_is_batch_normalize": True,
    "algorithm.rollout_correction.rollout_rs": ("token_k1", "seq_mean_k3"),
    "algorithm.rollout_correction.rollout_rs_threshold": ("2.0", "2.0"),
    "actor.entropy_coeff": 0.01,
    "actor.policy_loss.loss_mode": "kl_cov",
    "evaluate.bootstrap": True,
    "monitor.detailed_stats": True,
}
OF_EXPERTS = {
    "algorithm.keep_pos_ratio": 0.5,
    "data.curriculum.enable": True,
    "actor.use_kl_loss": True,
    "algorithm.distillation.path": "random",
    "algorithm.distillation.form": "top_k",
    "reward.overlong_buffer.enable": True,
    "reward.overlong_buffer.len": 4,
    "reward.length.form": "group",
}


def test_every_row_of_the_tables_is_read():
    tables = PAGE.read_text().partition("\n## Other trackers")[0]
    rows = re.findall(r"^\| `", tables, re.MULTILINE)
    assert len(rows) == len(CATALOGUE) + len(HISTOGRAMS) > 150
    assert {metric.needs for metric in CATALOGUE} - {""} == NEEDS


def test_no_name_is_declared_twice_and_each_is_in_its_section():
    variants = [variant for metric in CATALOGUE for variant in metric.variants()]
    assert len(variants) == len(set(variants))
    for title, text in re.findall(r"^## ([\w/, ]+/)$\n(.*?)(?=^## |\Z)", METRICS, re.MULTILINE | re.DOTALL):
        assert {variant.partition("/")[0] for metric in declared(text) for variant in metric.variants()} == {
            part.strip("/") for part in title.split(", ")
        }


def test_names_are_matched_part_by_part():
    metric = find("eval/reasoning_gym/leg_counting/acc/best@4")
    assert metric is not None and metric.name.endswith("{best|worst}@{k}")
    assert find("eval/a/acc/best@4/std") != metric and find("eval/a/acc/best@four") is None
    assert find("rollout/my.score/mean") is not None and find("rollout/score") is None
    assert not matches("perf/throughput", "perf/throughputs") and not matches("a.b", "aXb")
    criterion = find("rollout_corr/rollout_rs_seq_mean_k1_seq_mean")
    assert criterion is not None and criterion.name.endswith("{criterion}_seq_{mean|max|min|std}")


def check_always(rows):
    """Every step has what is always emitted."""
    always = [metric for metric in CATALOGUE if metric.when == "always"]
    for metric, row in itertools.product(always, rows):
        for variant in metric.variants():
            assert any(matches(variant, found) for found in row), f"{variant} is missing in step {row['step']}"


def test_a_run_emits_what_is_declared(whole):
    rows = read_metrics(whole[0])
    check_always(rows[1:])
    assert {name for name in itertools.chain(*rows) if find(name) is None} == {"step"}


@pytest.mark.slow
def test_runs_emit_what_is_declared_and_nothing_else(tmp_path):
    emitted, reward = set(), {"reward.model.path": str(write_reward_model(tmp_path / "reward_model"))}
    experts = changes_of(with_tokenizer("qwen3_moe", tmp_path)) | OF_EXPERTS | reward
    for name, changes in (("experts", experts), ("critic", WITH_CRITIC)):
        steps = {"trainer.total_training_steps": 2, "trainer.save_freq": 1, "trainer.test_freq": 2}
        config = small_config(tmp_path / name, **changes | steps)
        train(config)
        rows = read_metrics(config.workdir)
        emitted |= set(itertools.chain(*rows)) - {"step"}
        check_always(rows[1:])
    emitted |= set(bench(config, tmp_path / "bench", step=2)[0]["metrics"])
    assert {name for name in emitted if find(name) is None} == set()
    variants = [variant for metric in CATALOGUE if not metric.needs for variant in metric.variants()]
    unseen = {variant for variant in variants if not any(matches(variant, name) for name in emitted)}
    assert unseen == set(), json.dumps(sorted(unseen))
