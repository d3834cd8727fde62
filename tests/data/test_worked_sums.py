from collections import Counter

import pytest

from dapo_jax.data import worked_sums
from dapo_jax.data.prompt_files import read_prompt_files
from dapo_jax.errors import InputError
from dapo_jax.rewards.verifiers import VERIFIERS, verifier_for
from dapo_jax.tools.data import main


def test_no_order_of_a_heldout_sum_is_trained_on(tmp_path, capsys):
    main(["sums", f"--output={tmp_path}"])
    assert "heldout.parquet\n  written      96" in capsys.readouterr().out
    found = worked_sums.sums(400, 96, seed=0)
    train, heldout = ({tuple(sorted(terms)) for terms in found[split]} for split in ("train", "heldout"))
    assert train.isdisjoint(heldout)
    assert len(set(found["train"])) == 400 and len(heldout) == 96
    assert Counter(map(len, found["train"])) == {2: 200, 3: 200}
    rows = read_prompt_files([str(tmp_path / "sums" / "train.parquet")])
    assert [row.ground_truth for row in rows] == [str(sum(terms)) for terms in found["train"]]


def test_no_split_has_the_example_of_the_prompt(monkeypatch):
    monkeypatch.setattr(worked_sums, "LOW", 5)
    monkeypatch.setattr(worked_sums, "HIGH", 8)  # so few numbers that most sums are drawn
    for split in (split for seed in range(8) for split in worked_sums.sums(20, 2, seed).values()):
        assert (5, 6, 8) not in {tuple(sorted(terms)) for terms in split}


def test_the_worked_answer_is_right():
    row, answer = worked_sums.sum_row((2, 3, 4), "train"), worked_sums.worked_out((2, 3, 4))
    asked = ["8 + 5 + 6 = ?", "8 + 5 = 13, 13 + 6 = 19", "2 + 3 + 4 = ?"]
    assert [message["content"] for message in row["prompt"]] == asked and answer == "2 + 3 = 5, 5 + 4 = 9"
    verifier = VERIFIERS[verifier_for(row["data_source"])].score
    assert verifier(row["data_source"], answer, row["reward_model"]["ground_truth"], {})["acc"]


@pytest.mark.parametrize(("num_train", "num_heldout"), [(2, 3), (0, 2), (3000, 2), (2, 500)])
def test_impossible_numbers_are_refused(num_train, num_heldout):
    with pytest.raises(InputError, match="ask for"):
        worked_sums.sums(num_train, num_heldout, seed=0)
