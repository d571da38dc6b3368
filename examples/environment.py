"""Example of an environment with up to three turns, for `examples/capitals.jsonl`. Run from the repository's root:

    [task]
    type = "environment"
    path = "examples/capitals.jsonl"
    environment = "examples.environment:SecondChance"
    turns = 3
    config = { hint = "No. Try again: " }

It is created once, with the tokenizer and `task.config`, and plays many episodes at once in the driver's own thread.
Await whatever takes long, and put blocking calls into `asyncio.to_thread`.
"""

from typing import Any

from stretto.environments.protocol import Outcome, Policy
from stretto.errors import RoomError
from stretto.types import Prompt


class SecondChance:
    """Asks again after a wrong answer. A turn earns 1 for the capital, and a wrong one nothing."""

    def __init__(self, tokenizer: Any, *, hint: str = "No. Try again: ") -> None:
        self.tokenizer = tokenizer
        self.hint = tokenizer.encode(f"\n{hint}", add_special_tokens=False)

    async def episode(self, prompt: Prompt, policy: Policy) -> Outcome:
        context, rewards = list(prompt.tokens), list[float]()
        while len(rewards) < 3:
            try:
                turn = await policy.generate(context)
            except RoomError:  # the hint left no room for another token
                break
            said = self.tokenizer.decode(turn.tokens.tolist(), skip_special_tokens=True)
            rewards.append(float(str(prompt.row["answer"]).lower() in said.lower()))
            if rewards[-1]:
                break
            context += [*turn.tokens.tolist(), *self.hint]  # the answer, then the hint that the policy observes
        return Outcome(tuple(rewards))
