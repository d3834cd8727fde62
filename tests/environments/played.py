"""Environments of the tests, in all forms, and some that fail."""

import os
import random
import time
from typing import Literal

import numpy as np


class Guess:
    """Text form: find the number that the seed says, in at most three turns."""

    def __init__(self, most: int = 9) -> None:
        self.most = most

    def reset(self, seed, **row):
        self.number, self.turn = seed % self.most + 1, 0
        return f"guess 1..{self.most}: {row.get('hint', '')}"

    def step(self, text):
        self.turn += 1
        right = str(self.number) in text
        noise = random.randrange(100) + int(np.random.randint(100))  # of states that belong to the episode
        info = {"acc": float(right), "noise": noise, "word": "kept out"}
        return "right" if right else f"not {text}, {noise}", float(right) / self.turn, right or self.turn == 3, info


class Desk:
    """Tool form."""

    async def reset(self, **row):
        self.answer, self.said = row["answer"], []

    def calculator(self, expression: str, digits: int | None = None) -> str:
        """Evaluates a product.

        Args:
            expression: for example "3*4".
        """
        self.said.append(expression)
        left, right = expression.split("*")
        return str(int(left) * int(right))

    @staticmethod
    async def unit(kind: Literal["m", "s"] = "m") -> dict:
        """A unit."""
        return {"unit": kind}

    def get_reward(self) -> float:
        return float(self.answer in self.said)


def twice(number: int) -> int:
    """Twice a number."""
    return 2 * number * number // number


class Broken(Guess):
    """Fails in the way that a turn names, once in all processes if a marker is given, else always."""

    def __init__(self, marker: str = "") -> None:
        super().__init__()
        self.marker = marker

    def step(self, text):
        if not self.marker or not os.path.exists(self.marker):
            if self.marker:
                open(self.marker, "w").close()
            match text:
                case "raise":
                    raise RuntimeError("out of order")
                case "die":
                    os._exit(3)
                case "sleep":
                    time.sleep(60)
                case "eat":
                    self.kept = bytearray(10**9)
                case "say nothing":
                    return None, 0.0, False
                case "no number":
                    return "", float("nan"), False
        return super().step(text)


class Fickle(Guess):
    """Draws from nothing that the seed fixes."""

    def reset(self, seed, **row):
        super().reset(seed, **row)
        return str(time.perf_counter_ns())


class NoReset:
    def step(self, text):
        return "", 0.0, True


class NoTools:
    def reset(self):
        return None


class Arity(NoTools):
    def step(self):
        return "", 0.0, True


class Untyped(NoTools):
    def lookup(self, word):
        return word


class Odd(NoTools):
    def lookup(self, word: complex):
        return word


def right(text, answer):
    """What both the environment and the reward function of a plain run find."""
    return float(answer in text.replace("<unk>", "").replace("<pad>", ""))


def score(text, truth):
    return right(text, truth)


class Asks:
    """Tool form without rewards, which asks first: its seed."""

    def reset(self, seed, **row):
        return f"seed {seed % 1000}"

    def twice(self, number: int) -> int:
        """Twice a number."""
        return 2 * number


def heard(data_source, solution, ground_truth, extra_info):
    """1 if the prompt has what `Asks` says, with its number."""
    word, _, number = extra_info["prompt"][-1]["content"].partition(" ")
    return {"score": float(word == "seed"), "acc": 0.0, "number": float(number) if word == "seed" else -1.0}


class OneTurn:
    """A plain run as an environment."""

    def reset(self, answer):
        self.answer = answer

    def step(self, text):
        return "", right(text, self.answer), True


class Sums:
    """Several turns on a sum: an answer of random digits to each, some slowly."""

    def __init__(self, most_s: float = 0.0, turns: int = 3, first: str = "", fails_on: str = "") -> None:
        self.most_s, self.turns, self.first, self.fails_on = most_s, turns, first, fails_on

    def reset(self, seed, answer):
        self.answer, self.turn = answer or "1", 0
        return self.first or None

    def step(self, text):
        if self.answer in self.fails_on.split():
            raise RuntimeError("out of order")
        self.turn += 1
        self.pause = random.random()
        time.sleep(time.perf_counter_ns() % 1000 / 1000 * self.most_s)
        said = str(random.randrange(10 ** (1 + self.turn)))
        reward = self.reward(text)
        return said, reward / self.turn, self.turn == self.turns, {"acc": reward}

    def reward(self, text):
        return right(text, self.answer)


class Parity(Sums):
    """The same, where a random model is often right."""

    def reward(self, text):
        return float(len(text) % 2)
