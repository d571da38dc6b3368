"""A small task of several turns: `guess`.

Numbers from 1 to 7 are to be found, one after the other, as many as there are turns for. The prompt says nothing of
them; each turn names a number with its last character and is answered by `>` where the number to find is greater, `<`
where it is smaller, `!` where it is found, after which the next one is to be found, and `?` where no number was named.

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


def numbers_at(index: int, seed: int, turns: int, *, held_out: bool) -> list[int]:
    """What is to be found in episode `index` of the endless list that `seed` names: no more than there are turns."""
    random = Random(f"guess {seed} {held_out} {index}")
    return [random.randint(1, NUMBERS) for _ in range(turns)]


class Guess:
    """Plays the game until there is no turn or token left."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def episode(self, prompt: Prompt, policy: Policy) -> Outcome:
        numbers, context, rewards = list(prompt.row["numbers"]), list(prompt.tokens), list[float]()
        low, high, turns = 1, NUMBERS, len(numbers)
        while len(rewards) < turns:
            try:
                turn = await policy.generate(context)
            except RoomError:
                break
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


def _named(text: str) -> int | None:
    """The number that a turn ends with."""
    return int(text[-1]) if text and text[-1] in "0123456789" else None
