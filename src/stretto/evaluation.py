"""Evaluation on held-out prompts: always of one named version, at low priority, without stopping rollout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stretto.engines.protocol import Engine
from stretto.environments.data import PromptStream
from stretto.environments.protocol import Environment
from stretto.errors import RequestError, RewardError
from stretto.seeds import derived_seed
from stretto.store.journal import Journal
from stretto.types import Completion, Request, Sampling

PRIORITY = 1  # after everything that trains

Moment = Literal["before", "during", "after"]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What one evaluation measured, and of which version."""

    version: int
    moment: Moment
    score: float | None  # mean reward, accuracy where rewards are 0 or 1; None where nothing could be scored
    num_scored: int
    num_failed: int
    mean_tokens: float  # of the completions that there are, scored or not
    at: float  # `time.time()` when it ended
    seconds: float


class Evaluator:
    """Runs the same held-out prompts with the same seeds under whatever version it is given."""

    def __init__(
        self,
        prompts: PromptStream,
        count: int,
        *,
        environment: Environment,
        sampling: Sampling,
        seed: int,
        journal: Journal,
    ) -> None:
        self._prompts = prompts
        self._count = count
        self._environment = environment
        self._sampling = sampling
        self._seed = seed
        self._journal = journal

    async def evaluate(self, engine: Engine, version: int, moment: Moment) -> EvaluationResult:
        """Evaluate `version`, which must be resident on `engine`. A failed request or reward is counted, not scored."""
        started = time.time()
        policies = [_EvaluationPolicy(self, engine, version, index) for index in range(self._count)]
        episodes = [
            self._environment.episode(self._prompts.prompt(index), policy) for index, policy in enumerate(policies)
        ]
        results = await asyncio.gather(*episodes, return_exceptions=True)
        rewards: list[float] = []
        for outcome in results:
            if isinstance(outcome, RewardError | RequestError):
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            rewards.append(outcome)
        lengths = [policy.num_tokens for policy in policies if policy.num_tokens is not None]
        ended = time.time()
        return EvaluationResult(
            version=version,
            moment=moment,
            score=sum(rewards) / len(rewards) if rewards else None,
            num_scored=len(rewards),
            num_failed=len(results) - len(rewards),
            mean_tokens=sum(lengths) / len(lengths) if lengths else 0.0,
            at=ended,
            seconds=ended - started,
        )

    def record(self, result: EvaluationResult, line: Mapping[str, Any] | None = None) -> None:
        """Write a result into the journal; apart from `evaluate`, so that it comes when the core counts it.

        `line` is that of `metrics.jsonl`.
        """
        self._journal.evaluation(
            result.version,
            result.moment,
            result.at,
            reward=result.score,
            num=result.num_scored,
            seconds=result.seconds,
            line=line,
        )


class _EvaluationPolicy:
    __slots__ = ("_engine", "_index", "_owner", "_version", "num_tokens")

    def __init__(self, owner: Evaluator, engine: Engine, version: int, index: int) -> None:
        self._owner = owner
        self._engine = engine
        self._version = version
        self._index = index
        self.num_tokens: int | None = None  # None: the request failed

    async def generate(self, tokens: Sequence[int]) -> Completion:
        completion = await self._engine.generate(
            Request(
                id=-1 - self._index,
                version=self._version,
                prompt=tuple(tokens),
                seed=derived_seed(self._owner._seed, "evaluation", self._index),
                sampling=self._owner._sampling,
                priority=PRIORITY,
            )
        )
        self.num_tokens = len(completion.tokens)
        return completion
