"""Losses and estimators of your own, by FILE.py:function."""

import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from config_problems import problems
from small_run import rows_without_clock, small_config

import dapo_jax as dx
from dapo_jax.algorithms import named
from dapo_jax.algorithms.policy_loss import vanilla
from dapo_jax.command.option_uses import unread
from dapo_jax.config.own_functions import code_of
from dapo_jax.config.sections import Config
from dapo_jax.config.values import flat, freeze, with_values
from dapo_jax.learner.trained_networks import needs_statistics, trained
from dapo_jax.monitor.recipe import keep_files
from dapo_jax.parallel import processes
from dapo_jax.run import run_id
from dapo_jax.run.settings import algorithm_settings
from dapo_jax.training.loop import train
from dapo_jax.training.summary import own_functions

LOSS, ESTIMATOR = named.LOSS, named.ESTIMATOR
CODE = """
import re

import jax.numpy as jnp
from dapo_jax.algorithms.policy_loss import vanilla as same
from dapo_jax.algorithms.group_relative import grpo

def plain(logprobs, old_logprobs, advantages, mask, *, clip_ratio_low=0.2):
    return -jnp.exp(logprobs - old_logprobs) * advantages, {"ratio": jnp.exp(logprobs - old_logprobs)}

def alone(logp, old, adv, mask): return -logp * adv
def averaged(logp, old, adv, mask): return (-logp * adv).mean()
def needy(logp, old, adv, mask, *, selected): return -logp * adv
def three(logp, old, adv): return -logp * adv
def fails(logp, old, adv, mask): return logp.nothing
def centred(rewards, mask, group_ids, *, gamma=1.0): return rewards.sum(-1) - rewards.sum(-1).mean()
def valued(rewards, mask, group_ids, *, values, lam): return rewards - values, rewards
def several(rewards, mask, group_ids, *, reward_parts, gdpo_reward_weights, entropy): return reward_parts.sum(-1)
def hinted(rewards, mask, group_ids, *, hint_logprobs): return hint_logprobs
def scalar(rewards, mask, group_ids): return rewards.sum()
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    named.reload()
    return lambda function: f"{tmp_path}/mine.py:{function}"


def test_a_loss_may_return_the_loss_alone_and_its_metrics_as_arrays(mine):
    logprobs, mask = jnp.array([[0.0, jnp.log(3.0)], [0.0, 9.0]]), jnp.array([[True, True], [True, False]])
    arrays = logprobs, jnp.zeros((2, 2)), jnp.ones((2, 2)), mask
    loss, metrics = named.named_loss(mine("plain"))(*arrays)
    assert loss.shape == (2, 2) and float(metrics["ratio"].total / metrics["ratio"].count) == pytest.approx(5 / 3)
    assert named.named_loss(mine("alone"))(*arrays)[1] == {} and named.named_loss("vanilla") is vanilla


def test_an_estimator_may_return_a_number_per_response(mine):
    rewards, mask = jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.array([[True, True], [True, False]])
    advantages, returns = named.named_estimator(mine("centred"))(rewards, mask, jnp.zeros(2, int))
    assert advantages.tolist() == returns.tolist() == [[0.5, 0.5], [-0.5, 0.0]]


@pytest.mark.parametrize(
    ("option", "function", "reason"),
    [
        (LOSS, "averaged", r"must return a number for each token, of the shape \(4, 3\) .*, not \(\): leave sums"),
        (LOSS, "needy", "needs selected, which nothing gives: after its 4 arrays a parameter must be one of sequences"),
        (LOSS, "three", "fails with TypeError: .*takes 3 positional arguments but 4"),
        (LOSS, "fails", "fails with AttributeError"),
        (LOSS, "absent", r"has no function 'absent' \(it has "),
        (ESTIMATOR, "scalar", r"of the shape \(4, 3\)"),
        (ESTIMATOR, "needy", "needs mask, selected, which nothing gives: after its 3 arrays .* one of values, "),
    ],
)
def test_a_function_that_cannot_work_is_refused_before_a_device_is_used(option, function, reason, mine):
    (problem,) = problems({option: mine(function)})
    assert problem.startswith(f"{option}='{mine(function)}'")
    assert re.search(reason, problem) and ", or FILE.py:function" in problems({option: "grpoo"})[0]


def test_the_functions_of_the_page_can_be_used(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (tmp_path / "mine.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    named.reload()
    assert not problems({LOSS: f"{tmp_path}/mine.py:loss", ESTIMATOR: f"{tmp_path}/mine.py:centred"})
    scores, ids = jnp.array([[1.0, 0.0], [0.0, 0.0], [5.0, 0.0]]), jnp.array([0, 0, 1])
    found = named.named_estimator(f"{tmp_path}/mine.py:centred")(scores, jnp.ones((3, 2), bool), ids, num_groups=1)
    assert found[0][:2].tolist() == [[0.5, 0.5], [-0.5, -0.5]]


def test_its_parameters_decide_what_else_is_read(mine):
    def config(**changes):
        return with_values(Config(), {name.replace("__", "."): value for name, value in changes.items()})

    own = config(actor__policy_loss__loss_mode=mine("plain"), actor__clip_ratio_low=0.1, actor__clip_ratio_c=5.0)
    assert list(unread(own)) == ["actor.clip_ratio_c"]
    valued = config(algorithm__adv_estimator=mine("valued"), algorithm__lam=0.9, algorithm__gamma=0.9)
    assert list(unread(valued)) == ["algorithm.gamma"] and list(trained(valued)) == ["actor", "critic"]
    assert not needs_statistics(valued.algorithm)
    parts = '{"right": "math_dapo", "brief": {"function": "format", "weight": 0.5}}'
    several = config(algorithm__adv_estimator=mine("several"), reward__functions=parts)
    settings = algorithm_settings(several.algorithm, several.reward)
    assert settings.gdpo_reward_keys == ("right", "brief") and settings.gdpo_reward_weights == (1.0, 0.5)
    assert needs_statistics(several.algorithm) and not named.own_problem(ESTIMATOR, mine("several"), vars(settings))
    assert "several rewards" in problems({ESTIMATOR: mine("several")})[0]
    assert (
        "keep_pos_ratio=0.5 is not read" in problems({ESTIMATOR: mine("centred"), "algorithm.keep_pos_ratio": 0.5})[0]
    )
    with pytest.raises(dx.InputError, match="Policy does not support algorithm.adv_estimator=.*hinted"):
        dx.Policy(dx.load_config("tiny", {ESTIMATOR: mine("hinted")}))


def test_a_run_keeps_whole_paths_and_copies_and_names_what_has_changed(mine, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    values = dx.load_config("tiny", {LOSS: "mine.py:plain", "workdir": f"{tmp_path}/run"})
    config = freeze(values)
    assert config.actor.policy_loss.loss_mode == mine("plain")
    keep_files(config.workdir, {LOSS: mine("plain"), ESTIMATOR: "grpo"}, done=0)
    copy = tmp_path / "run" / "functions" / f"{LOSS}.py"
    assert copy.read_text() == CODE and not caplog.records
    (tmp_path / "mine.py").write_text(CODE + "# changed")
    keep_files(config.workdir, {LOSS: mine("plain")}, done=2)
    assert f"{LOSS}={mine('plain')}: the file has changed since the run stopped, so steps from 3" in caplog.text
    assert copy.with_name(f"{LOSS}.until_step_2.py").read_text() == CODE


def test_processes_that_have_other_code_are_refused(mine, tmp_path, monkeypatch):
    tasks = {"own": {"files": ["own.jsonl"], "reward_function": mine("plain")}, "other": {"files": ["other.jsonl"]}}
    changes = {LOSS: mine("plain"), "evaluate.tasks": json.dumps(tasks), "reward.function": "textwrap.dedent"}
    config = freeze(dx.load_config("tiny", changes))
    functions = own_functions(config)
    assert functions["evaluate.tasks.0"] == mine("plain") and b"dedent" in code_of(functions["reward.function"])
    assert [code_of(name) for name in ("grpo", "no.such.function", str(tmp_path / "gone.py:f"))] == [b""] * 3
    of_processes = []  # each call is another process
    monkeypatch.setattr(processes, "gather", lambda values: of_processes.append(values) or of_processes)
    monkeypatch.setattr(run_id, "check_shared", lambda directory: None)
    monkeypatch.setattr(run_id.jax, "process_count", lambda: 2)
    for _ in range(2):
        run_id.check_processes(flat(config), functions, "checkpoints")
    (tmp_path / "mine.py").write_text(CODE + "# changed")
    with pytest.raises(dx.InputError, match=f"the code of {LOSS} must be the same in all processes"):
        run_id.check_processes(flat(config), functions, "checkpoints")


OWN = {"trainer.save_freq": 1, "trainer.max_ckpt_to_keep": 9}


@pytest.mark.slow
def test_functions_of_ones_own_train_and_resume_as_those_of_the_package_do(whole, mine, tmp_path):
    changes = {**OWN, LOSS: mine("same"), ESTIMATOR: mine("grpo")}
    train(small_config(tmp_path / "run", **changes, **{"trainer.total_training_steps": 2}))
    (tmp_path / "mine.py").rename(tmp_path / "elsewhere.py")
    folder = tmp_path / "run"
    with pytest.raises(dx.InputError, match="mine.py does not exist: correct the path .functions/ in the workdir"):
        dx.train(dx.load_config(folder / "config.json"))
    copies = {LOSS: f"{folder}/functions/{LOSS}.py:same", ESTIMATOR: f"{folder}/functions/{ESTIMATOR}.py:grpo"}
    dx.train(dx.load_config(folder / "config.json", {"trainer.total_training_steps": 4, **copies}))
    assert rows_without_clock(folder) == whole[2]
    shutil.rmtree(folder / "functions")
    dx.TrainResult(freeze(dx.load_config(folder / "config.json"))).export(tmp_path / "model")  # reads neither


@pytest.mark.slow
def test_a_loss_of_ones_own_goes_with_means_adapters_and_packed_rows(mine, tmp_path):
    packed = {"actor.use_dynamic_bsz": True, "actor.ppo_max_token_len_per_device": 64}
    more, rows = {**packed, "actor.loss_agg_mode": "seq-mean-token-mean", "model.lora.rank": 2}, []
    for name in ("vanilla", mine("same")):
        folder = tmp_path / name.rpartition(":")[2]
        steps = {"trainer.total_training_steps": 1, "trainer.save_freq": -1}
        train(small_config(folder, **steps, **more, **{LOSS: name}))
        rows.append(rows_without_clock(folder))
    assert rows[0] == rows[1]
