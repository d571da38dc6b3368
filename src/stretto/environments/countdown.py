"""The quickstart task: `countdown-chain`.

The prompt `4+3*17?` asks for `(4 + 3 * 17) mod 10`. The demonstrated answer is a chain of three characters per step, a
two-digit count and the running value. It restates the count and the first value, counts down to zero and ends with the
result: the answer to `4+3*2?` is `024` `017` `000` `=0`. A model that writes the chain is nearly always right; one that
guesses at once is right one time in ten. The count is log-normal, so completion lengths have a long tail.

Imports only the standard library: reward workers load this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

MAX_COUNT = 50
MEDIAN_COUNT = 3.0
SIGMA_COUNT = 1.4
CHARACTERS = "0123456789+*?="

REWARD = "stretto.environments.countdown:reward"


@dataclass(frozen=True, slots=True)
class Problem:
    """`x + a * n` modulo 10."""

    x: int  # 0-9
    a: int  # 1-5
    n: int  # 1-50

    @property
    def prompt(self) -> str:
        return f"{self.x}+{self.a}*{self.n}?"

    @property
    def answer(self) -> int:
        return (self.x + self.a * self.n) % 10

    @property
    def held_out(self) -> bool:
        """True if the problem is for evaluation only: one `x` in ten for every `a` and `n`."""
        return (self.x + 3 * self.a + 7 * self.n) % 10 == 0


def draw(random: Random, *, held_out: bool = False) -> Problem:
    """Draws a problem from one side of the split."""
    while True:
        n = math.ceil(random.lognormvariate(math.log(MEDIAN_COUNT), SIGMA_COUNT))
        if n > MAX_COUNT:
            continue
        problem = Problem(x=random.randrange(10), a=random.randrange(1, 6), n=n)
        if problem.held_out == held_out:
            return problem


def problem_at(index: int, seed: int, *, held_out: bool) -> Problem:
    """Returns problem `index` of the endless list that `seed` defines. Random access, so nothing is stored."""
    return draw(Random(f"countdown-chain {seed} {held_out} {index}"), held_out=held_out)


def chain(problem: Problem, random: Random | None = None, slips: float = 0.0) -> str:
    """Returns the demonstrated completion. `slips` is the probability of a wrong value, which the chain continues."""
    value = problem.x
    steps = [f"{problem.n:02d}{value}"]
    for count in range(problem.n - 1, -1, -1):
        value = (value + problem.a) % 10
        if random is not None and random.random() < slips:
            value = random.randrange(10)
        steps.append(f"{count:02d}{value}")
    return "".join(steps) + f"={value}"


def reward(prompt: str, completion: str, *, answer: int, **row: Any) -> float:
    """Returns 1 if the completion ends with `=` and the right digit, else 0."""
    return float(completion.endswith(f"={answer}"))
