"""A random two-layer model learns to read the board of FrozenLake, in episodes of several turns.

    pip install 'dapo_jax[gymnasium]'
    python configs/frozen_lake.py    (writes data/frozen_lake/3x3/train.jsonl and others, and says what chance achieves)
    python -m dapo_jax.train --config configs/frozen_lake.py

Hardware: two CPU cores; about three minutes. Expect: accuracy on 12 boards of 3x3 that are not trained on
from 0.02 to 0.74 (docs/results/environments.md), where a player who draws among all moves reaches the goal with
probability 0.04, and one who draws among right and down with 0.38. No demonstration comes first: the policy finds the
letters of moves, then that most of them should be right or down, then the holes.
"""

import functools
import importlib
import json
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

from dapo_jax.config import default_config

FOLDER = Path("data/frozen_lake")
BOARDS = {2: (3, 3), 3: (36, 12), 4: (256, 64)}  # size: how many to train on and to evaluate on
MOVES = {"l": 0, "d": 1, "r": 2, "u": 3}  # first letters of left, down, right and up; gymnasium's numbers


class Lake:
    """Text form: the last letter of a turn is a move, and what is said is the board. It ends after 2 x size turns."""

    def reset(self, board: str, **row: Any) -> None:
        self.board, self.turn = board, 0
        self.lake = made(board)
        self.lake.reset()

    def step(self, text: str) -> tuple[str, float, bool, dict[str, float]]:
        place, reward, ended = self.lake.unwrapped.s, 0.0, False
        if text[-1:] in MOVES:
            place, reward, ended, _, _ = self.lake.step(MOVES[text[-1]])
        self.turn += 1
        done = ended or self.turn == 2 * self.board.index("/")
        return shown(self.board, place), float(reward), done, {"acc": float(reward)}


def made(board: str) -> Any:
    gymnasium = importlib.import_module("gymnasium")  # an extra, which the config itself does not need
    return gymnasium.make("FrozenLake-v1", desc=board.split("/"), is_slippery=False)


def shown(board: str, place: int) -> str:
    """The board with the player as p and holes as h: "p.h" above "..." above "..g"."""
    lines = board.replace("S", ".").replace("F", ".").lower().split("/")
    row, column = divmod(int(place), len(lines))
    lines[row] = f"{lines[row][:column]}p{lines[row][column + 1 :]}"
    return "\n".join(lines)


def boards(size: int) -> tuple[list[str], list[str]]:
    """Different boards to train on and to evaluate on, as gymnasium draws them; of 2x2, there are three in all."""
    lakes = importlib.import_module("gymnasium.envs.toy_text.frozen_lake")
    num_train, num_heldout = BOARDS[size]
    found: dict[str, None] = {}
    drawn = ("/".join(lakes.generate_random_map(size, seed=seed)) for seed in count())
    while len(found) < (3 if size == 2 else num_train + num_heldout):
        found[next(drawn)] = None
    return list(found)[-num_train:], list(found)[:num_heldout]


def reaches(board: str, moves: str) -> float:
    """How often a player who draws one of `moves` in each turn reaches the goal."""
    table = made(board).unwrapped.P

    @functools.cache
    def value(place: int, turns: int) -> float:
        return mean(after(table[place][MOVES[move]][0], turns - 1) for move in moves) if turns else 0.0

    def after(outcome: tuple[float, int, float, bool], turns: int) -> float:
        _, place, reward, ended = outcome
        return reward if ended else value(place, turns)

    return value(0, 2 * board.index("/"))


def get_config() -> Any:
    config = default_config()
    config.workdir = "runs/frozen_lake"
    config.model.path = "random"
    config.model.random.initializer_range = 0.1
    config.model.enable_gradient_checkpointing = False
    config.environment.path = f"{Path(__file__).absolute()}:Lake"
    config.environment.turn_template = "\n{observation}\n"
    config.data.train_files = (str(FOLDER / "3x3/train.jsonl"),)
    config.data.val_files = (str(FOLDER / "3x3/heldout.jsonl"),)
    config.data.answer_key = ""
    config.data.system_prompt = ""
    config.data.train_batch_size = 16
    config.data.gen_batch_size = 24
    config.data.max_prompt_length = 32
    config.data.max_response_length = 96
    config.rollout.n = 16
    config.rollout.stop = tuple(MOVES)
    config.rollout.max_num_seqs = 192
    config.algorithm.filter_groups.max_num_gen_batches = 1
    config.algorithm.filter_groups.on_limit = "partial"
    config.algorithm.filter_groups.on_empty = "train_unfiltered"
    config.actor.ppo_mini_batch_size = 4
    config.actor.ppo_micro_batch_size_per_device = 64
    config.actor.use_dynamic_bsz = False  # one shape: few programs to compile
    config.actor.entropy_coeff = 0.001
    config.actor.optim.lr = 3e-3
    config.actor.optim.lr_warmup_steps = 0
    config.actor.optim.weight_decay = 0.0
    config.evaluate.n = 16
    config.trainer.total_training_steps = 60
    config.trainer.test_freq = 20
    config.trainer.save_freq = 60
    return config


def main() -> None:
    for size in BOARDS:
        folder, found = FOLDER / f"{size}x{size}", dict(zip(("train", "heldout"), boards(size), strict=True))
        folder.mkdir(parents=True, exist_ok=True)
        for split, chosen in found.items():
            rows = [
                {"prompt": [{"role": "user", "content": shown(board, 0)}], "data_source": folder.name, "board": board}
                for board in chosen
            ]
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
            (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
        chance, right_or_down = (mean(reaches(board, moves) for board in found["heldout"]) for moves in ("ldru", "rd"))
        print(f"{folder.name}: {chance:.3f} held out by chance, {right_or_down:.3f} by only right or down")


if __name__ == "__main__":
    main()
