"""Evaluation on held-out prompts: always of one named version, at low priority, without stopping rollout."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stretto import clock
from stretto.answers import refuse_answer
from stretto.engines.protocol import Engine
from stretto.environments.data import PromptStream
from stretto.environments.protocol import Environment, earned
from stretto.environments.reward_worker import last_line
from stretto.episodes import Episode
from stretto.errors import EngineError, RequestError, RewardError, StrettoError, VersionNotResidentError
from stretto.seeds import derived_seed, turn_seed
from stretto.store.journal import Journal
from stretto.turns import Turns, token_ids
from stretto.types import Completion, Prompt, Request, Sampling

log = logging.getLogger(__name__)

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
    at: float  # when it ended
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
        vocabulary: int | None = None,
        max_turns: int = 1,
        episode_s: float | None = None,
    ) -> None:
        """`vocabulary`: tokens that an engine may answer with; None: any. `max_turns`: of one episode.

        `episode_s`: an environment's deadline between tokens; None: what it waits for has its own.
        """
        self._prompts = prompts
        self._count = count
        self._environment = environment
        self._sampling = sampling
        self._seed = seed
        self._journal = journal
        self._vocabulary = vocabulary
        self._max_turns = max_turns
        self._episode_s = episode_s
        self.num_ended = 0  # episodes, scored or failed, of all evaluations

    async def evaluate(
        self, engine: Engine, version: int, moment: Moment, checksum: str | None = None
    ) -> EvaluationResult:
        """Evaluate `version`, which must be resident on `engine`. A failed request or reward is counted, not scored.

        Raises `EngineError` where the engine fails, or answers with something else than it was asked for; where a
        `checksum` is given, that includes other weights.
        """
        started = clock.now()
        checksums = {} if checksum is None else {version: checksum}
        prompts = [self._prompts.prompt(index) for index in range(self._count)]
        policies = [
            _EvaluationPolicy(self, engine, version, checksums, index, prompt) for index, prompt in enumerate(prompts)
        ]
        episodes = [self._episode(prompt, policy) for prompt, policy in zip(prompts, policies, strict=True)]
        results = await asyncio.gather(*episodes, return_exceptions=True)
        rewards: list[float] = []
        failures: list[RewardError | RequestError] = []
        for outcome in results:
            if isinstance(outcome, RewardError | RequestError):
                failures.append(outcome)
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            rewards.append(outcome)
        if failures:
            failed = f"{len(failures)} of {len(results)} held-out prompts failed"
            log.warning("%s in the evaluation of version %d, the first of them: %s", failed, version, failures[0])
        lengths = [policy.turns.num_sampled for policy in policies if policy.turns.done]
        ended = clock.now()
        return EvaluationResult(
            version=version,
            moment=moment,
            score=sum(rewards) / len(rewards) if rewards else None,
            num_scored=len(rewards),
            num_failed=len(failures),
            mean_tokens=sum(lengths) / len(lengths) if lengths else 0.0,
            at=ended,
            seconds=ended - started,
        )

    async def _episode(self, prompt: Prompt, policy: _EvaluationPolicy) -> float:
        try:
            outcome = await policy.episode.play(self._environment, prompt, policy)
            reward, _ = earned(outcome, len(policy.turns.done))
            return reward
        except StrettoError:
            raise
        except Exception as error:
            raise RewardError(last_line(error)) from error
        finally:
            self.num_ended += 1

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
    __slots__ = ("_checksums", "_engine", "_index", "_owner", "_version", "episode", "turns")

    def __init__(
        self, owner: Evaluator, engine: Engine, version: int, checksums: Mapping[int, str], index: int, prompt: Prompt
    ) -> None:
        self._owner = owner
        self._engine = engine
        self._version = version
        self._checksums = checksums
        self._index = index
        self.turns = Turns(prompt.tokens)
        self.episode = Episode(owner._episode_s)

    @property
    def left(self) -> int:
        return max(0, self._owner._sampling.max_tokens - self.turns.num_tokens)

    async def generate(self, tokens: Sequence[int]) -> Completion:
        context = token_ids(tokens)
        return await self.episode.ask(lambda: self._turn(context))

    async def _turn(self, tokens: tuple[int, ...]) -> Completion:
        owner, number = self._owner, len(self.turns.done)
        room = self.turns.room(number, tokens, max_turns=owner._max_turns, max_tokens=owner._sampling.max_tokens)
        request = Request(
            id=-1 - self._index,
            version=self._version,
            prompt=tokens,
            seed=turn_seed(derived_seed(owner._seed, "evaluation", self._index), number),
            sampling=replace(owner._sampling, max_tokens=room),
            priority=PRIORITY,
            keep=number + 1 < owner._max_turns,
        )
        completion = await self._answer(request)
        self.turns.add(tokens, completion)
        return completion

    async def _answer(self, request: Request) -> Completion:
        try:
            completion = await self._engine.generate(request)
        except VersionNotResidentError as error:
            raise EngineError(f"it had confirmed version {self._version}, and says now: {error}") from error
        except StrettoError:
            raise
        except Exception as error:
            raise EngineError(f"it answered an evaluation with {type(error).__name__}: {error}") from error
        vocabulary = self._owner._vocabulary
        refuse_answer(completion, request, checksums=self._checksums, vocabulary=vocabulary, continued=False)
        return completion
