"""One rollout: a trajectory from its admission to its end, as the run loop carries it.

```
            place            ask               end_turn              complete          score          end
   WAITING -------> PLACED -------> GENERATING ---------> BETWEEN_TURNS -----> SCORING -----> SCORED -----> ENDED
      ^                |             |     ^                 |   |
      |                |             |     +------ ask ------+   |
      +--- interrupt --+-------------+---------------------------+
      |                |             |                           |
      +-- SUSPENDING <-+--- leave ---+---------------------------+          `TRANSITIONS` is the whole table
```

The controller decides (`core/controller.py`): its ledger says which trajectories exist and which instance each runs on.
A rollout holds the data of one of them, and the state in which the loop's own requests for it are. To the ledger a
rollout that is GENERATING is running, and one that is WAITING or SUSPENDING is waiting. One that is PLACED or
BETWEEN_TURNS is running too until its world has taken some time (`frees_row`); from then on it is between turns.

`run/rollout_runner.py` and `run/suspensions.py` change it, `run/load_sampler.py` and `run/quarantine.py` read it, and
`assembly/resume.py` makes it from the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from stretto.errors import TransitionError
from stretto.run.turns import Turns
from stretto.types import Completion, Lineage, Prompt, Request, RewardPart, Suspended


class RolloutState(Enum):
    """The part of its life that a rollout is in."""

    WAITING = "waiting"  # has no instance; all of its tokens so far are here
    PLACED = "placed"  # has an instance, and has not asked it for anything yet
    GENERATING = "generating"  # its instance owes it a turn
    BETWEEN_TURNS = "between turns"  # a turn is done; its environment may ask for another
    SUSPENDING = "suspending"  # called back; an instance that it was on has not handed it over yet
    SCORING = "scoring"  # has its last token, and no reward yet
    SCORED = "scored"  # has its reward
    ENDED = "ended"  # trained, failed, filtered or dropped: the loop has forgotten it


TRANSITIONS: Mapping[RolloutState, frozenset[RolloutState]] = {
    # To SCORING: it had its last token before it was called back, and the instance's answer came late.
    RolloutState.WAITING: frozenset({RolloutState.PLACED, RolloutState.SCORING, RolloutState.ENDED}),
    RolloutState.PLACED: frozenset(
        {
            RolloutState.GENERATING,
            RolloutState.SUSPENDING,
            RolloutState.WAITING,  # its instance was lost, or its attempt failed
            RolloutState.SCORING,  # as above, or its episode returned after the turns that were done before
            RolloutState.ENDED,
        }
    ),
    RolloutState.GENERATING: frozenset(
        {RolloutState.BETWEEN_TURNS, RolloutState.SUSPENDING, RolloutState.WAITING, RolloutState.ENDED}
    ),
    RolloutState.BETWEEN_TURNS: frozenset(
        {
            RolloutState.GENERATING,
            RolloutState.SCORING,
            RolloutState.SUSPENDING,
            RolloutState.WAITING,
            RolloutState.ENDED,
        }
    ),
    # To PLACED: the core has another instance for it before the one that it leaves has answered.
    RolloutState.SUSPENDING: frozenset(
        {RolloutState.WAITING, RolloutState.PLACED, RolloutState.SCORING, RolloutState.ENDED}
    ),
    RolloutState.SCORING: frozenset({RolloutState.SCORED, RolloutState.ENDED}),
    RolloutState.SCORED: frozenset({RolloutState.ENDED}),
    RolloutState.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class PendingTurn:
    """A turn that an instance was asked for and has not answered."""

    request: Request
    engine_steps: int  # of that instance when it was asked
    answered: asyncio.Future[None]  # done once the answer is here, whatever it is


@dataclass(slots=True, eq=False)
class Placement:
    """The stay of a rollout on one instance, from the core's `Start` or `Resume` until it leaves."""

    instance: int
    version: int  # that the core named; under `partial` a later turn may have a newer one
    resumed: bool = False  # by a `Resume`
    reason: str = ""  # why it was moved here
    pending: PendingTurn | None = None  # what the instance owes it; stays if it is called back meanwhile


@dataclass(slots=True, eq=False)
class Rollout:
    """A trajectory in progress. Its state changes by the methods below, and each of them checks `TRANSITIONS`."""

    id: int
    group: int
    version: int
    seed: int
    prompt: Prompt
    row_number: int  # of the data set, where the prompt was drawn from

    # From SCORING and from SCORED on.
    lineages: tuple[Lineage, ...] = ()  # all of it
    reward: float | None = None
    turn_rewards: tuple[float, ...] | None = None  # if the environment returns one for each turn
    reward_parts: tuple[RewardPart, ...] | None = None  # if the task has several rewards

    # Before SCORING.
    suspended: Suspended | None = None  # the unfinished turn, as it last left an instance
    turns: Turns = field(init=False)  # those of its episode that are done; empty again from SCORED on
    context: int = 0  # tokens, prompt included, when it last asked for a turn or had one
    max_context: int = 0  # the most that the context can become by the turn that it last asked for

    # PLACED, GENERATING, BETWEEN_TURNS: where it is. WAITING, SUSPENDING, PLACED: where it was.
    placement: Placement | None = None
    source: int | None = None  # the instance that it left; None once its move was counted
    departures: list[asyncio.Future[None]] = field(default_factory=list)  # each done once an instance handed it over

    # The core was last told that it waits for its world. Stays if it moves: the report may still be on its way.
    frees_row: bool = False

    # For `run/quarantine.py`.
    losses: int = 0  # instances that were lost while they generated for it
    lost_at: int = 0  # the most tokens of context that it had when one was lost

    state: RolloutState = field(init=False)

    def __post_init__(self) -> None:
        scoring = self.is_generated and self.reward is None
        self.turns = Turns.of(self.prompt.tokens, self.lineages if scoring else ())
        if not self.is_generated:
            self.state = RolloutState.WAITING
        else:
            self.state = RolloutState.SCORING if self.reward is None else RolloutState.SCORED

    # -- its transitions -----------------------------------------------------------------------------------------------

    def place(self, placement: Placement) -> None:
        """Gives it an instance."""
        self._become(RolloutState.PLACED)
        self.placement = placement

    def ask(self, request: Request, *, context: int, engine_steps: int) -> PendingTurn:
        """Notes that its instance is asked for a turn, with `context` tokens before the next one."""
        assert self.placement is not None, self
        self._become(RolloutState.GENERATING)
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.context = context
        self.max_context = len(request.prompt) + request.sampling.max_tokens
        self.placement.pending = PendingTurn(request, engine_steps, answered)
        return self.placement.pending

    def end_turn(
        self,
        placement: Placement,
        tokens: Sequence[int],
        completion: Completion,
        lineage: int = 0,
        train: bool = True,
    ) -> None:
        """Adds a turn that `placement` answered with; it may have been called back from there meanwhile."""
        self.turns.add(tokens, completion, lineage, train)
        self.context = len(tokens) + len(completion.tokens)
        self.suspended, placement.pending = None, None
        if self.placement is placement:
            self._become(RolloutState.BETWEEN_TURNS)

    def discard_turns(self, number: int) -> None:
        """Forgets turn `number` and all after it, the unfinished one included: its episode took another course."""
        assert not self.is_generated, self
        self.turns.discard(number)
        self.suspended = None

    def interrupt(self) -> None:
        """Takes its instance away: that was lost, or the attempt to generate there failed."""
        assert self.placement is not None, self
        self.source, self.placement = self.placement.instance, None
        self._become(RolloutState.SUSPENDING if self._is_owed else RolloutState.WAITING)

    def leave(self, departure: asyncio.Future[None]) -> Placement:
        """Calls it back from its instance, which is done handing it over when `departure` is; returns the placement.

        If it has ended, it stays so: then only its tokens so far are wanted.
        """
        assert self.placement is not None, self
        placement, self.placement = self.placement, None
        self.source = placement.instance
        # If it never got here, the instance before this one may still have to hand it over.
        self.departures = [*(each for each in self.departures if not each.done()), departure]
        if self.state is not RolloutState.ENDED:
            self._become(RolloutState.SUSPENDING)
        return placement

    def handed_over(self) -> None:
        """Notes that a departure is done."""
        if self.state is RolloutState.SUSPENDING and not self._is_owed:
            self._become(RolloutState.WAITING)

    def complete(self) -> tuple[Lineage, ...]:
        """Makes lineages of its turns: it has its last token."""
        self._become(RolloutState.SCORING)
        self.placement = None
        self.lineages = self.turns.lineages()
        return self.lineages

    def score(
        self,
        reward: float,
        turn_rewards: tuple[float, ...] | None,
        reward_parts: tuple[RewardPart, ...] | None = None,
    ) -> None:
        """Gives it its reward. Its turns are not needed any more."""
        self._become(RolloutState.SCORED)
        self.reward, self.turn_rewards, self.reward_parts = reward, turn_rewards, reward_parts
        self.turns = Turns(self.prompt.tokens)

    def end(self) -> None:
        """Ends it, in whatever state it is."""
        self._become(RolloutState.ENDED)

    def _become(self, state: RolloutState) -> None:
        """Changes the state. Raises `TransitionError` if it cannot follow the present one."""
        if state not in TRANSITIONS[self.state]:
            raise TransitionError(
                f"the rollout of trajectory {self.id} is {self.state.value} and cannot become {state.value}"
            )
        self.state = state

    # -- what follows from it ------------------------------------------------------------------------------------------

    @property
    def _is_owed(self) -> bool:
        """True if an instance that it left has not handed it over yet."""
        return not all(departure.done() for departure in self.departures)

    @property
    def is_generated(self) -> bool:
        """True from SCORING on: it has its last token, unless it has ended without."""
        return bool(self.lineages)

    @property
    def instance(self) -> int | None:
        """The instance that it is on; None: it has none, or needs none any more."""
        return None if self.placement is None else self.placement.instance

    @property
    def newest_version(self) -> int | None:
        """The version of its newest token; None if it has no token here."""
        if self.suspended is not None and len(self.suspended.tokens):
            version, versions = self.suspended.request.version, self.suspended.token_versions
        elif self.turns.done:
            last = self.turns.done[-1].completion
            version, versions = last.version, last.token_versions
        else:
            return None
        return version if versions is None else int(versions.max())

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far; of the unfinished turn, those that it had when it last left an instance."""
        if self.is_generated:
            return sum(lineage.completion.num_sampled for lineage in self.lineages)
        return self.turns.num_sampled + (0 if self.suspended is None else len(self.suspended.tokens))
