"""A small task of several turns: `guess`.

A number from 1 to 7 is to be found. The prompt says nothing of it; each turn names a number with its last character and
is answered by `>` where the number to find is greater, `<` where it is smaller, `?` where no number was named. Who asks
for the middle of what is left finds every number in three turns.

A turn earns 1 for the number itself and `WASTED` for what the answers before had already ruled out, or for naming
nothing; so what went wrong, and when, is told turn by turn. It can be learned from nothing: an untrained model names a
number now and then.
"""

from __future__ import annotations

from random import Random
from typing import Any

from stretto.environments.protocol import Outcome, Policy
from stretto.errors import RoomError
from stretto.types import Prompt

NUMBERS = 7
PROMPT = f"1-{NUMBERS}?"
WASTED = -0.2

ENVIRONMENT = "stretto.environments.guess:Guess"


def number_at(index: int, seed: int, *, held_out: bool) -> int:
    """Number `index` of the endless list that `seed` names."""
    return Random(f"guess {seed} {held_out} {index}").randint(1, NUMBERS)


class Guess:
    """Plays the game, until the number is named or there is no turn or token left."""

    def __init__(self, tokenizer: Any, *, turns: int) -> None:
        self._tokenizer = tokenizer
        self._turns = turns

    async def episode(self, prompt: Prompt, policy: Policy) -> Outcome:
        number, context, rewards = int(prompt.row["number"]), list(prompt.tokens), list[float]()
        low, high = 1, NUMBERS
        while len(rewards) < self._turns:
            try:
                turn = await policy.generate(context)
            except RoomError:
                break
            named = _named(self._tokenizer.decode(turn.tokens.tolist(), skip_special_tokens=True))
            if named == number:
                rewards.append(1.0)
                break
            rewards.append(0.0 if named is not None and low <= named <= high else WASTED)
            answer = "?" if named is None else ">" if named < number else "<"
            if answer == ">":
                low = max(low, (named or 0) + 1)
            elif answer == "<":
                high = min(high, (named or 0) - 1)
            context += [*turn.tokens.tolist(), *self._tokenizer.encode(answer, add_special_tokens=False)]
        return Outcome(tuple(rewards))


def _named(text: str) -> int | None:
    """The number that a turn ends with."""
    return int(text[-1]) if text and text[-1] in "0123456789" else None
