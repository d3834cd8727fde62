"""A step that is computed again: equal to the bit, else the first number that differs is named, with both values."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from environments.test_episodes import FILE
from judge_server import Answer, judge_server
from rewards.test_judged import judged
from small_run import Killed, at_call, copied, kill, own_function, small_config

import dapo_jax as dx
from dapo_jax import cli
from dapo_jax.errors import InputError
from dapo_jax.monitor.records import read_metrics, to_json_line
from dapo_jax.tools import replay as module
from dapo_jax.training import step as step_module
from dapo_jax.training.loop import train

SAVED = {"trainer.max_ckpt_to_keep": 9}
CARRY = {"algorithm.filter_groups.leftover": "carry", "algorithm.filter_groups.leftover_max_staleness": 4}
OVERLONG = {
    "reward.overlong_buffer.enable": True,
    "reward.overlong_buffer.len": 2,
    "algorithm.overlong_filtering": True,
    "algorithm.gdpo_reward_keys": ("acc", "overlong_reward"),
    "algorithm.filter_groups.max_num_gen_batches": 9,
    "algorithm.filter_groups.on_limit": "fallback_unfiltered",
}
EPISODES = {
    "environment.path": f"{FILE}:Sums",
    "environment.arguments": json.dumps({"first": "now: "}),
    "environment.turn_template": "\n{observation} =",
    "data.max_response_length": 48,
    "rollout.n": 4,
    "algorithm.filter_groups.enable": False,
    "data.gen_batch_size": 4,
}


def files_of(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def rewritten(folder, step, changes):
    """Changes metrics of a step where the run has recorded them."""
    rows = [row | (changes if row["step"] == step else {}) for row in read_metrics(folder)]
    (folder / "metrics.jsonl").write_text("".join(map(to_json_line, rows)))


def test_only_what_was_changed_in_the_records_differs_and_nothing_is_written(whole, tmp_path):
    folder = copied(whole[0], tmp_path / "run", step=3)
    shutil.rmtree(folder / "checkpoints" / "1")
    rewritten(folder, 3, {"actor/grad_norm": 1.0, "actor/no_such": 1.0})
    samples = folder / "samples" / "step_000003.jsonl"
    first, *rest = [json.loads(line) for line in samples.read_text().splitlines()]
    first["acc"] += 1
    samples.write_text("".join(map(to_json_line, [first, *rest])))
    before = files_of(folder)
    found = dx.replay(folder, 3)
    assert files_of(folder) == before
    verdict, norm, other = found.differences
    assert (verdict.part, verdict.recorded, verdict.found) == ("verdicts", first["acc"], first["acc"] - 1)
    assert first["prompt"] in verdict.name and verdict.name.endswith("acc") and not found.equal
    assert (norm.part, norm.name, norm.recorded, norm.found) == (
        *("gradient norm", "actor/grad_norm", 1.0),
        whole[2][3]["actor/grad_norm"],
    )
    assert (other.name, other.found) == ("actor/no_such", "absent")
    counts = found.counts
    assert found.step == 3 and counts["prompts"] == 8
    assert counts["weights"] > 20 and counts["state"] > 4, "the checkpoint of the step has them"


def test_what_cannot_be_computed_again_is_refused_in_one_line(whole, tmp_path, capsys):
    branch = copied(whole[0], tmp_path / "branch", step=2)
    config = json.loads((branch / "config.json").read_text())
    config["trainer"]["resume_from_path"] = str(tmp_path / "gone")
    (branch / "config.json").write_text(json.dumps(config))
    cases = (
        ("nowhere", 1, "must be a folder of this machine with the config.json of a run"),
        (whole[0] / "metrics.jsonl", 1, "must be a folder of this machine"),
        (whole[0], 0, "--step=0 must be a training step that .* has done: 1 to 4"),
        (whole[0], 5, "--step=5 must be a training step .*: 1 to 4"),
        (
            branch,
            1,
            "no checkpoint precedes step 1, and the run's beginning is gone: .*; steps after 1 can be replayed",
        ),
    )
    for run, step, message in cases:
        with pytest.raises(InputError, match=message):
            module.planned(run, step, None, ())
    with pytest.raises(SystemExit) as end:
        cli.main(["replay", str(whole[0]), "--step", "9"])
    assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_group_that_is_not_there_is_refused_before_the_steps_are_computed(whole, monkeypatch):
    monkeypatch.setattr(module, "open_run", lambda *given, **options: pytest.fail("it has begun"))
    with pytest.raises(InputError, match=r"--group=500 must be a group of the step: 1 to \d+$"):
        module.carried_out(module.planned(whole[0], 4, None, ()), 500)


@pytest.mark.slow
def test_a_run_that_was_extended_is_evaluated_where_it_was(tmp_path):
    """Its former last step was evaluated, and would not be now: an alarm was said to differ.

    What only a console or a tracker reads is not in the way of a replay, which has neither.
    """
    train(small_config(tmp_path, **{**SAVED, "trainer.test_freq": 2, "trainer.total_training_steps": 3}))
    train(small_config(tmp_path, **{**SAVED, "trainer.test_freq": 2, "trainer.total_training_steps": 4}))
    config = json.loads((tmp_path / "config.json").read_text())
    config["monitor"]["console"], config["trainer"]["project_name"] = "json", "sums"
    config["trainer"]["logger"] = ["console", "wandb"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for folder in (tmp_path / "checkpoints").iterdir():
        if folder.name in ("1", "2", "3"):
            shutil.rmtree(folder)
    found = dx.replay(tmp_path, 4)
    assert found.equal and found.counts["other metrics"] > 4, str(found)


def test_the_plan_says_what_may_explain_a_difference(whole, tmp_path):
    folder = copied(whole[0], tmp_path, step=2)
    assert module.planned(folder, 4, None, ()).tolerance == 0 and not module.planned(folder, 2, None, ()).notes
    recorded = json.loads((folder / "environment.json").read_text())
    recorded |= {"devices": "3 x NVIDIA H100", "versions": {**recorded["versions"], "dapo_jax": "0.0.1"}}
    (folder / "environment.json").write_text(json.dumps(recorded))
    (folder / "train.log").write_text("resuming with a changed config: seed: 1 -> 0\n")
    text = str(module.planned(folder, 4, None, ["actor.optim.lr=0.5"]))
    assert "from the checkpoint of step 2; compared up to rounding, 0.0001 x max(1, |number|)" in text
    for note in ("0.0.1, this is", "devices: 3 x NVIDIA H100; here: 8 x cpu", "config: seed: 1 -> 0", "lr=0.5"):
        assert note in text
    config = json.loads((folder / "config.json").read_text())
    config["mesh"]["fsdp"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    assert module.planned(folder, 4, None, ()).config.mesh.fsdp == 1


def test_a_replay_reads_the_programs_that_the_run_keeps(whole, tmp_path, monkeypatch):
    """Of trainer.deterministic=on: compiled again, they may have other kernels."""
    folder, seen = copied(whole[0], tmp_path / "run", step=2), []
    (folder / "compiled").mkdir()
    (folder / "compiled" / "program").touch()

    def opened(workdir, **options):
        seen.append(Path(workdir, "compiled", "program").exists())
        raise InputError("enough")

    monkeypatch.setattr(module, "open_workdir", opened)
    with pytest.raises(InputError, match="enough"):
        dx.replay(folder, 2)
    assert seen == [True]


@pytest.mark.slow
def test_the_command_ends_with_0_and_shows_a_group(whole, capsys, monkeypatch):
    """Step 1 has two updates, and the second clips tokens: over all rows, as many as the metric says."""
    watches, shown = [], module.group_table
    monkeypatch.setattr(module, "group_table", lambda *given: watches.append(given[6].__self__) or shown(*given))
    with pytest.raises(SystemExit) as end:
        cli.main(["replay", str(whole[0]), "--step", "1", "--group", "2"])
    text, [watch] = capsys.readouterr().out, watches
    assert end.value.code == 0 and text.endswith("\nequal\n") and "\ngroup 2 of 8" in text
    assert "kept, group " in text and "advantage  trained  " in text and "  loss  clipped" in text
    tokens, rows = watch.batch.loss_mask.sum(), range(len(watch.batch.mask))
    clipped = sum(float(watch.of_row(row)["clipped"]) for row in rows)
    assert clipped > 3 and clipped / tokens == pytest.approx(whole[2][1]["actor/pg_clipfrac"], rel=1e-6)
    with pytest.raises(InputError, match="--group=99 must be a group of the step: 1 to 8"):
        dx.replay(whole[0], 4, group=99)


@pytest.mark.slow
def test_verdicts_of_a_verifier_that_has_changed_are_named(tmp_path):
    name = own_function(tmp_path, "return float(solution[:1] == ground_truth)")
    train(small_config(tmp_path / "run", **{"reward.function": name, "trainer.total_training_steps": 2}))
    assert dx.replay(tmp_path / "run", 2).equal
    own_function(tmp_path, "return float(solution[:1] != ground_truth)")
    found = dx.replay(tmp_path / "run", 2)
    first = found.differences[0]
    assert (first.step, first.part) == (1, "verdicts") and "\nfirst difference: step 1, verdicts: group" in str(found)
    [note] = module.planned(tmp_path / "run", 2, None, ()).notes
    assert note.startswith("reward.function=") and "is not" in note


@pytest.mark.slow
def test_a_batch_that_was_kept_is_compared_array_by_array_also_without_weights(tmp_path, capsys):
    """With the run's weights; then without them, of a run whose beginning is gone."""
    name = own_function(tmp_path, "return float(solution[:1] == ground_truth)")
    changes = {"reward.function": name, "actor.old_logprob": "recompute", "trainer.total_training_steps": 2}
    run, page = tmp_path / "run", tmp_path / "page.html"
    train(small_config(run, **{"trainer.keep_batches": "2"}, **changes))
    path = run / "batches" / "step_000002.npz"
    assert list(path.parent.iterdir()) == [path]
    found = dx.replay(run, 2)
    assert found.equal and found.counts["log-probabilities"] > dx.replay(run, 1).counts["log-probabilities"]
    with np.load(path) as file:
        kept = dict(file)
    arrays = {name: array.copy() for name, array in kept.items()}
    arrays["old_logprobs"][3, 0] += 0.5
    arrays["groups/score acc"][1, 2] += 1
    np.savez(path, **arrays)
    verdict, logprob = dx.replay(run, 2).differences
    assert (verdict.part, verdict.name) == ("verdicts", "['groups/score acc'][1, 2]")
    assert (logprob.part, logprob.name) == ("log-probabilities", "['old_logprobs'][3, 0]")
    assert logprob.recorded == pytest.approx(logprob.found + 0.5)

    np.savez(path, **kept)
    shutil.rmtree(run / "checkpoints")
    config = json.loads((run / "config.json").read_text())
    config["trainer"]["resume_from_path"] = str(tmp_path / "gone")
    (run / "config.json").write_text(json.dumps(config))
    before = files_of(run)
    with pytest.raises(SystemExit) as end:
        cli.main(["replay", str(run), "--step", "2", "--group", "1", "--report", str(page)])
    text = capsys.readouterr().out
    assert end.value.code == 0 and "step_000002.npz; compared to the bit\n" in text and "is gone" in text
    assert files_of(run) == before and "advantage  trained" in page.read_text()
    found = dx.replay(run, 2, from_batch=True)
    assert set(found.counts) == {"prompts", "tokens", "verdicts", "rewards", "kept groups", "advantages"}
    with pytest.raises(InputError, match="has kept no batch of step 1, but of 2"):
        module.planned(run, 1, None, (), from_batch=True)
    np.savez(path, **kept | {"advantages": kept["advantages"] + np.float32(0.5)})
    assert [one.part for one in dx.replay(run, 2).differences] == ["advantages"]
    np.savez(path, **kept)
    own_function(tmp_path, "return float(solution[:1] != ground_truth)")
    assert dx.replay(run, 2).differences[0].part == "verdicts"
    own_function(tmp_path, "return float(solution[:1] == ground_truth) / (len(solution) != 3)")
    [failed] = dx.replay(run, 2).differences
    assert failed.name == "how many verifications failed" and failed.recorded == 0 < failed.found


@pytest.mark.slow
def test_a_judge_is_not_asked_again(tmp_path):
    with judge_server() as server:
        server.rule = lambda prompt: Answer(f"Score: {len(prompt) % 10}")
        train(judged(server, tmp_path, **{"trainer.rollout_ahead": 1}))
        asked = len(server.asked)
        found = dx.replay(tmp_path, 2)  # whose state has metrics of the judge: of the batch that was sampled ahead
        assert found.equal and found.counts["state"] > 20 and len(server.asked) == asked > 8, str(found)


@pytest.mark.slow
def test_a_run_that_was_killed_and_resumed_is_computed_again(tmp_path, monkeypatch):
    config = small_config(tmp_path, **SAVED)
    with monkeypatch.context() as patch:
        at_call(patch, step_module, "update", 4, kill)
        with pytest.raises(Killed):
            train(config)
    assert dx.replay(tmp_path, 3).equal, "as it is: killed, with a row that has no checkpoint"
    train(config)
    assert dx.replay(tmp_path, 3).equal and dx.replay(tmp_path, 4).equal


@pytest.mark.slow
def test_on_another_mesh_numbers_are_equal_up_to_rounding(whole):
    found = dx.replay(whole[0], 3, **{"mesh.fsdp": 4})
    assert found.tolerance == 1e-4 and found.equal, str(found)
    assert not dx.replay(whole[0], 3, tolerance=0.0, **{"mesh.fsdp": 4}).equal


@pytest.mark.slow
@pytest.mark.long("carry", "ahead", "episodes")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"trainer.rollout_ahead": 1, "actor.ppo_micro_batch_size_per_device": 16}, id="ahead"),
        pytest.param(CARRY, id="carry"),
        pytest.param({**CARRY, "rollout.segment_length": 2, "trainer.total_training_steps": 5}, id="segments"),
        pytest.param({"model.lora.rank": 2, "actor.ppo_epochs": 2}, id="adapters"),
        pytest.param({"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": True}, id="critic"),
        pytest.param({"algorithm.distillation.path": "random"}, id="teacher"),
        pytest.param({"algorithm.adv_estimator": "remax", "actor.old_logprob": "recompute"}, id="remax"),
        pytest.param({"actor.policy_loss.loss_mode": "clip_cov"}, id="clip_cov"),
        pytest.param({**OVERLONG, "algorithm.adv_estimator": "gdpo", "rollout.n": 4}, id="overlong"),
        pytest.param({**EPISODES, "algorithm.use_kl_in_reward": True}, id="episodes"),
    ],
)
def test_steps_of_every_kind_of_run_are_computed_again(tmp_path, changes):
    train(small_config(tmp_path, **{**SAVED, "trainer.keep_batches": "3", **changes}))
    found = dx.replay(tmp_path, 3, group=1)  # from the checkpoint of step 2
    assert found.equal and found.table, str(found)
    found = dx.replay(tmp_path, 3, from_batch=True)
    without = {"remax": "reward_baselines", "random": "teacher"}  # what advantages need
    needed = [word for key, word in without.items() if key in changes.values()]
    assert found.equal and ("advantages" not in found.counts) == bool(needed), str(found)
    assert all(word in str(found) for word in needed)
    shutil.rmtree(tmp_path / "checkpoints" / "2")
    before = files_of(tmp_path)
    found = dx.replay(tmp_path, 4)  # from the beginning, with the checkpoint of step 4 to compare with
    assert files_of(tmp_path) == before
    assert found.equal and found.counts["weights"] > 20 and found.counts["state"] > 4, str(found)
