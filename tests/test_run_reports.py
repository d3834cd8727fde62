"""What a run shows in TensorBoard and under samples/, and the table at its end."""

import dataclasses
import json
import re

import pytest
from event_files import values_of
from metrics_page import HISTOGRAMS
from small_run import small_config

from dapo_jax.config.sections import Config
from dapo_jax.config.values import flat
from dapo_jax.monitor.records import read_metrics
from dapo_jax.monitor.tensorboard import LAYOUT
from dapo_jax.training.loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "run"  # with no other run beside it, to be compared with
    changes = {"trainer.total_training_steps": 2, "monitor.num_samples": 6, "monitor.console": "json"}
    train(small_config(workdir, **changes))
    return workdir


@pytest.fixture(scope="module")
def shown(run):
    """The values of all events by tag."""
    values: dict = {}
    for _, value in values_of(run):
        values.setdefault(value.tag, []).append(value)
    return values


def test_every_chart_shows_a_metric_of_a_run(run):
    tags = {name.replace("@", "_") for row in read_metrics(run) for name in row}
    for category in LAYOUT.values():
        for title, (_, patterns) in category.items():
            assert any(re.match(pattern, tag) for pattern in patterns for tag in tags), title


def test_the_histograms_are_those_of_the_catalogue_and_count_what_was_trained(run, shown):
    names = {tag for tag, values in shown.items() if values[0].HasField("histo")}
    assert names == {metric.name for metric in HISTOGRAMS}
    rows, names = read_metrics(run)[1:], ("response_length", "critic/advantages", "rollout/logprob", "actor/ratio")
    for row, lengths, advantages, logprobs, ratios in zip(rows, *(shown[name] for name in names), strict=True):
        tokens = row["dynamic_sampling/trained_tokens"]
        assert lengths.histo.sum == advantages.histo.num == logprobs.histo.num == ratios.histo.num == tokens
        assert ratios.histo.min < 1 < ratios.histo.max
        assert lengths.histo.min <= row["response_length/min"] and row["response_length/max"] <= lengths.histo.max
    scores = [value.histo.sum / value.histo.num for value in shown["critic/score"]]
    assert scores == pytest.approx([row["critic/score/mean"] for row in rows])


def samples_of(run, step):
    path = run / f"samples/step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_are_of_all_kinds_and_none_stands_there_twice(run, shown):
    for step in (1, 2):
        samples = [sample for sample in samples_of(run, step) if sample["kind"] != "held_out"]
        kinds = {kind: [sample for sample in samples if sample["kind"] == kind] for kind in ("best", "worst", "any")}
        assert len(samples) == 6 and len(kinds["best"]) == len(kinds["worst"]) == 1
        scores = [sample["seq_reward"] for sample in samples]
        assert kinds["best"][0]["seq_reward"] == max(scores) > min(scores) == kinds["worst"][0]["seq_reward"]
        assert all(0 < sample["length"] <= 4 for sample in samples)
    *_, last = shown["samples/text_summary"]
    kinds = [row.split(" | ")[0].strip("| ") for row in last.tensor.string_val[0].decode().splitlines()[2:]]
    assert kinds == ["held&#95;out, arithmetic"] * 4 + ["best", "worst", "truncated"] + ["any"] * 3


def test_every_evaluation_keeps_the_first_responses_to_the_same_problems(run):
    before, after = ([sample for sample in samples_of(run, step) if sample["kind"] == "held_out"] for step in (0, 2))
    assert before == samples_of(run, 0) and len(before) == 4  # all problems that there are
    same = ("task", "prompt", "ground_truth")
    assert [[one[key] for key in same] for one in before] == [[one[key] for key in same] for one in after]
    assert len({one["prompt"] for one in before}) == 4 and {one["task"] for one in before} == {"arithmetic"}
    assert all(one["acc"] in (0, 1) and 0 < one["length"] <= 4 for one in (*before, *after))


def test_the_table_of_runs_begins_with_the_rate_the_seed_and_held_out_accuracy(run, shown):
    """Its columns are all curves, by name."""
    found = flat(dataclasses.replace(Config(), seed=3))
    assert found["seed"] == 3 and len(found) > 200
    assert found["algorithm.filter_groups.stream.slack"] == 1.0
    start = shown["_hparams_/session_start_info"][0].metadata.plugin_data.content
    assert all(name in start for name in (b"actor.optim.lr", b"seed")) and b"price_per_million" not in start
    curves = {tag: values for tag, values in shown.items() if values[0].HasField("simple_value")}
    assert min(curves) == "Main/1 held-out accuracy, arithmetic"
    accuracies = [row["eval/arithmetic/acc/mean@4"] for row in read_metrics(run) if "eval/arithmetic/acc/mean@4" in row]
    assert [value.simple_value for value in curves[min(curves)]] == pytest.approx(accuracies) and accuracies
