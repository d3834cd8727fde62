"""Pairs of early and late responses: of one kind, of one prompt where possible, short and visible."""

from run_folder import sample, write_run

from dapo_jax.tools.report.read import read_run
from dapo_jax.tools.report.samples import HELD_OUT_PAIRS, KINDS, trained_pairs
from dapo_jax.tools.report.samples import held_out_pairs as evaluated_pairs


def pairs_of(folder, samples, pairs=trained_pairs):
    return pairs(read_run("", str(write_run(folder, samples=samples))))


def test_the_earliest_and_the_latest_response_to_a_prompt_are_a_pair(tmp_path):
    answers = {step: [sample(response=f"at {step}"), sample(prompt=f"only {step}")] for step in (1, 2, 8, 9)}
    [pair] = pairs_of(tmp_path, answers)
    assert pair.same and (pair.before.response, pair.after.response) == ("at 1", "at 9")
    assert (pair.before.step, pair.after.step) == (1, 9)


def test_without_a_common_prompt_responses_of_one_kind_are_a_pair(tmp_path):
    [pair] = pairs_of(tmp_path, {1: [sample(prompt="a")], 9: [sample(prompt="b")]})
    assert pair.caption == f"Different prompts; {KINDS['any'][0]}."
    assert not pair.same and (pair.before.prompt, pair.after.prompt) == ("a", "b")


def test_kinds_are_not_mixed(tmp_path):
    """Else an early worst beside a late best would show progress in any run."""
    assert pairs_of(tmp_path, {1: [sample("worst", acc=0.0)], 9: [sample("best")]}) == []
    both = [sample("worst", response="bad", acc=0.0), sample("best", response="good")]
    found = pairs_of(tmp_path, {1: both, 9: both})
    assert [(pair.kind, pair.before.response) for pair in found] == [
        (KINDS["best"][0], "good"),
        (KINDS["worst"][0], "bad"),
    ]


def test_there_are_few_pairs_and_fair_ones_come_first(tmp_path):
    many = [sample(kind, prompt=f"{kind} {number}") for kind in KINDS for number in range(10)]
    found = pairs_of(tmp_path, {1: many, 9: many})
    assert len(found) == sum(most for _, most in KINDS.values()) and found[0].kind == KINDS["any"][0]
    assert pairs_of(tmp_path / "one", {1: many}) == []


def held_out(task="a", prompt="1 + 1 =", **fields):
    return sample("held_out", prompt, **fields) | {"task": task}


def test_a_held_out_problem_is_shown_as_its_first_and_last_evaluation_answered_it(tmp_path):
    """Those of trained responses are apart: an evaluation does not choose."""
    answers = {0: [held_out(response="one")], 2: [held_out(response="two")], 3: [held_out(response="three")]}
    [pair] = pairs_of(tmp_path, answers, evaluated_pairs)
    assert (pair.before.step, pair.before.response) == (0, "one")
    assert (pair.after.step, pair.after.response) == (3, "three")
    assert pair.same and pair.caption == "a" and pairs_of(tmp_path, answers) == []
    assert pairs_of(tmp_path / "one", {4: [held_out()]}, evaluated_pairs) == [], "nothing to compare"


def test_each_task_has_its_share_of_the_held_out_problems(tmp_path):
    many = [held_out(task, f"{task} {number}") for task in ("a", "b") for number in range(HELD_OUT_PAIRS)]
    found = pairs_of(tmp_path, {0: [*many, held_out("c", "only before")], 4: many}, evaluated_pairs)
    assert [pair.kind for pair in found] == ["a"] * (HELD_OUT_PAIRS // 2) + ["b"] * (HELD_OUT_PAIRS // 2)
    assert found[0].before.prompt == "a 0"


def test_a_verdict_is_a_word_and_scores_have_names(tmp_path):
    early = [sample(acc=1.0) | {"seq_reward": 0.5}, sample(prompt="x", acc=0.0), sample(prompt="y", acc=0.25)]
    found = [pair.before for pair in pairs_of(tmp_path, {1: early[:2], 9: early[:2]})]
    assert [shown.verdict for shown in found] == ["right", "wrong"]
    assert found[0].score == "score 1, acc 1, reward 0.500" and found[0].length == "3 tokens"
    assert pairs_of(tmp_path, {1: early[2:], 9: early[2:]})[0].before.verdict == "other"
