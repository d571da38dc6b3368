"""Several sources of rewards as one: functions in their processes, and each judge or reward model in its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from stretto.environments.grades import Grade, graded
from stretto.environments.reward_calls import Details, RewardSpec
from stretto.environments.reward_pipes import Scores
from stretto.errors import ScoringHaltedError


class ScoreSource(Protocol):
    """Scores completions with one reward or several. `RewardPool` is one, and `RayRewards`."""

    @property
    def longest_s(self) -> float: ...
    @property
    def waiting(self) -> str: ...
    @property
    def forms(self) -> tuple[str, ...]: ...

    async def start(self) -> None: ...

    async def scores(
        self, prompt: str, completion: str, row: Mapping[str, Any], details: Details | None = None
    ) -> Scores: ...

    async def score(
        self, prompt: str, completion: str, row: Mapping[str, Any], details: Details | None = None
    ) -> float | Grade: ...

    async def close(self) -> None: ...


Source = TypeVar("Source", bound=ScoreSource)


def combined_rewards(
    specs: Sequence[RewardSpec], make: Callable[[Sequence[RewardSpec]], Source]
) -> Source | CombinedRewards:
    """Makes what scores a task: one source if it has functions alone or one scorer, else all of them combined."""
    functions = [place for place, spec in enumerate(specs) if spec.built is None]
    places = [functions] if functions else []
    places += [[place] for place, spec in enumerate(specs) if spec.built is not None]
    sources = [make([specs[place] for place in some]) for some in places]
    return sources[0] if len(sources) == 1 else CombinedRewards(specs, list(zip(places, sources, strict=True)))


class CombinedRewards:
    """Asks all sources at once for each completion, and adds their scores up."""

    def __init__(self, specs: Sequence[RewardSpec], sources: Sequence[tuple[Sequence[int], ScoreSource]]) -> None:
        """`sources` come with the places of their rewards in `specs`."""
        self._specs = tuple(specs)
        self._sources = list(sources)

    @property
    def longest_s(self) -> float:
        """The most seconds that one reward may take."""
        return max(source.longest_s for _, source in self._sources)

    @property
    def waiting(self) -> str:
        """A sentence on what scoring waits for; empty if it waits for nothing."""
        return next((source.waiting for _, source in self._sources if source.waiting), "")

    @property
    def forms(self) -> tuple[str, ...]:
        """The form in which each reward is called, in words, once all sources have started."""
        found = {
            place: form for places, source in self._sources for place, form in zip(places, source.forms, strict=True)
        }
        return tuple(found[place] for place in range(len(self._specs)))

    async def start(self) -> None:
        """Starts the sources, one after the other. Raises `RecipeError` if one cannot be used."""
        for _, source in self._sources:
            await source.start()

    async def score(
        self, prompt: str, completion: str, row: Mapping[str, Any], details: Details | None = None
    ) -> float | Grade:
        """Returns the reward of one completion. Raises `RewardError`, which names the cause, if it has none.

        If one source fails, the others finish first: what they were asked is not lost if the completion is scored
        again, because a judge keeps its answers.
        """
        calls = (source.scores(prompt, completion, row, details) for _, source in self._sources)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            raise next((error for error in errors if isinstance(error, ScoringHaltedError)), errors[0])
        scores = [0.0] * len(self._specs)
        for (places, _), outcome in zip(self._sources, outcomes, strict=True):
            assert not isinstance(outcome, BaseException)
            for place, score in zip(places, outcome, strict=True):
                scores[place] = score
        return graded(self._specs, scores)

    async def close(self) -> None:
        """Ends all sources. Safe to call twice."""
        await asyncio.gather(*(source.close() for _, source in self._sources))
