"""A small task of several turns: `guess`.

The policy guesses secret numbers from 1 to 7, one after the other, until there are no turns left. The prompt does not
contain them. The last character of each turn is the guess. The reply is `>` if the secret number is greater, `<` if it
is smaller, `!` if the guess is right (the next secret number follows), and `?` if the turn does not end in a digit.

A turn earns 1 for a right guess, and `WASTED` for one that earlier replies had ruled out or for no guess. So each turn
has a reward that says what it was worth. The task can be learned from scratch: an untrained model guesses a number now
and then.

The world may take its time to answer, as real ones do: `wait_seconds` is the mean of a log-normal distribution, whose
median is half of the mean. Each answer's time depends on the episode and the turn alone.
"""

from __future__ import annotations

import asyncio
import math
from random import Random
from typing import Any

from stretto.environments.protocol import Outcome, Policy
from stretto.errors import RoomError
from stretto.types import Prompt

NUMBERS = 7
PROMPT = f"1-{NUMBERS}?"
WASTED = -0.2
SPREAD = 1.2  # of the logarithm of waiting times: one in a hundred takes eight times the mean

ENVIRONMENT = "stretto.environments.guess:Guess"


def numbers_at(index: int, seed: int, turns: int, *, held_out: bool) -> list[int]:
    """Returns the secret numbers of episode `index`, one for each turn, of the endless list that `seed` defines."""
    random = Random(f"guess {seed} {held_out} {index}")
    return [random.randint(1, NUMBERS) for _ in range(turns)]


class Guess:
    """Plays the game until no turn or token is left."""

    def __init__(self, tokenizer: Any, wait_seconds: float = 0.0) -> None:
        self._tokenizer = tokenizer
        self._wait_s = wait_seconds

    async def episode(self, prompt: Prompt, policy: Policy) -> Outcome:
        numbers, context, rewards = list(prompt.row["numbers"]), list(prompt.tokens), list[float]()
        low, high, turns = 1, NUMBERS, len(numbers)
        while len(rewards) < turns:
            try:
                turn = await policy.generate(context)
            except RoomError:
                break
            if self._wait_s:
                await asyncio.sleep(waiting_s(self._wait_s, prompt.index, len(rewards)))
            named = _named(self._tokenizer.decode(turn.tokens.tolist(), skip_special_tokens=True))
            if named is None:
                rewards.append(WASTED)
                answer = "?"
            elif named == numbers[0]:
                rewards.append(1.0)
                answer, low, high = "!", 1, NUMBERS
                del numbers[0]
            else:
                rewards.append(0.0 if low <= named <= high else WASTED)
                answer = ">" if named < numbers[0] else "<"
                low, high = (max(low, named + 1), high) if answer == ">" else (low, min(high, named - 1))
            context += [*turn.tokens.tolist(), *self._tokenizer.encode(answer, add_special_tokens=False)]
        return Outcome(tuple(rewards))


def waiting_s(mean_s: float, episode: int, turn: int) -> float:
    """Returns how long the world takes to answer turn `turn` of an episode."""
    median_s = mean_s / math.exp(SPREAD**2 / 2)
    return Random(f"wait {episode} {turn}").lognormvariate(math.log(median_s), SPREAD)


def _named(text: str) -> int | None:
    """Returns the number that a turn ends with, or None."""
    return int(text[-1]) if text and text[-1] in "0123456789" else None
