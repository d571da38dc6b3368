"""One trajectory on its way: where it is, what it has so far, and what is still to come back of it.

`flights.py` moves it, `surveys.py` and `suspects.py` look at it, `runtime/resuming.py` makes it anew from the journal.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from stretto.turns import Turns
from stretto.types import Completion, Prompt, Request, Suspended


@dataclass(slots=True)
class Flight:
    """A trajectory from its admission to its end."""

    id: int
    group: int
    version: int
    seed: int
    prompt: Prompt
    row_number: int  # of the data set, where the prompt was drawn from
    completion: Completion | None = None  # all of it, once it has its last token
    reward: float | None = None  # filled by the environment
    suspended: Suspended | None = None  # what the turn under way had when it last left an engine before its end
    instance: int | None = None  # where it runs
    source: int | None = None  # where it ran before
    leg: int = 0  # counts up when it is sent somewhere, and when it is called back
    leaving: list[asyncio.Future[None]] = field(default_factory=list)  # until its sources have answered
    request: Request | None = None  # what an instance was last asked for its turn under way
    call: asyncio.Future[None] | None = None  # until that instance's answer has come back
    called: int | None = None  # that instance
    context: int = 0  # tokens, prompt included, when its leg began
    steps: int = 0  # of the engine, at that time
    losses: int = 0  # of instances, while it ran on them
    lost_at: int = 0  # tokens of context that it had at most when one was lost
    turn_rewards: tuple[float, ...] | None = None  # where the environment tells them apart
    turns: Turns = field(init=False)  # of its episode, that are done; none once it has its reward

    def __post_init__(self) -> None:
        made, prompt = self.completion, self.prompt.tokens
        self.turns = Turns(prompt) if made is None or self.reward is not None else Turns.of(prompt, made)

    @property
    def between_turns(self) -> bool:
        """Whether its environment is at it, and no instance."""
        return bool(self.turns.done) and self.request is None

    @property
    def num_sampled(self) -> int:
        """Tokens that it has so far, those of the turn under way as far as they are here."""
        if self.completion is not None:
            return self.completion.num_sampled
        return self.turns.num_sampled + (0 if self.suspended is None else len(self.suspended.tokens))
