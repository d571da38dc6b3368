"""Evaluation of one version on held-out prompts, at low priority, while rollouts continue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from stretto import clock
from stretto.engines.protocol import Engine
from stretto.environments.data import PromptStream
from stretto.environments.function_specs import last_line
from stretto.environments.protocol import Environment, earned
from stretto.errors import EngineError, RequestError, RewardError, StalledError, StrettoError, VersionNotResidentError
from stretto.run.episodes import Episode, TakeTurn
from stretto.run.first_reward import FirstReward
from stretto.run.output_checks import refuse_output
from stretto.run.seeds import derived_seed, turn_seed
from stretto.run.turns import Turns
from stretto.store.journal import Journal
from stretto.types import Completion, EvaluationResult, Moment, Prompt, Request, Sampling

log = logging.getLogger(__name__)

PRIORITY = 1  # after everything that trains


@dataclass(slots=True, eq=False)
class _HeldOut:
    """One prompt of an evaluation, and the turns of its episode so far."""

    index: int
    prompt: Prompt
    turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self.turns = Turns(self.prompt.tokens)


class Evaluator:
    """Runs the same held-out prompts with the same seeds under any version."""

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
        first_reward: FirstReward | None = None,
    ) -> None:
        """`vocabulary`: size, an engine may answer with smaller token ids only; None: any. `max_turns`: of an episode.

        `episode_s`: an environment's deadline between tokens; None: whatever it waits for has a deadline.
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
        self._first_reward = first_reward or FirstReward()
        self.num_ended = 0  # episodes, scored or failed, of all evaluations

    async def evaluate(
        self, engine: Engine, version: int, moment: Moment, checksum: str | None = None
    ) -> EvaluationResult:
        """Evaluates `version`, which must be resident on `engine`. A failed request or reward is counted, not scored.

        Raises `EngineError` if the engine fails, or answers for something else than it was asked for. If a `checksum`
        is given, an answer of other weights is that too. Raises `StalledError` if nothing could ever be scored.
        """
        started = clock.now()
        checksums = {} if checksum is None else {version: checksum}
        held_out = [_HeldOut(index, self._prompts.prompt(index)) for index in range(self._count)]
        episodes = [self._episode(each, partial(self._turn, engine, version, checksums, each)) for each in held_out]
        results = await _outcomes(episodes)
        rewards: list[float] = []
        failures: list[RewardError | RequestError] = []
        for outcome in results:
            if isinstance(outcome, RewardError | RequestError):
                failures.append(outcome)
                continue
            if isinstance(outcome, Exception):
                raise outcome
            rewards.append(outcome)
        if failures:
            failed = f"{len(failures)} of {len(results)} held-out prompts failed"
            log.warning("%s in the evaluation of version %d, the first of them: %s", failed, version, failures[0])
        lengths = [each.turns.num_sampled for each in held_out if each.turns.done]
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

    async def _episode(self, held_out: _HeldOut, take_turn: TakeTurn) -> float:
        episode = Episode(held_out.turns, take_turn, max_tokens=self._sampling.max_tokens, deadline_s=self._episode_s)
        try:
            outcome = await episode.play(self._environment, held_out.prompt)
            reward, _ = earned(outcome, len(held_out.turns.done))
            self._first_reward.scored()
            return reward
        except StrettoError as error:
            if isinstance(error, RewardError):
                self._first_reward.failed(-1 - held_out.index, -1 - held_out.index, error)
            raise
        except Exception as error:
            failure = RewardError(last_line(error))
            self._first_reward.failed(-1 - held_out.index, -1 - held_out.index, failure)
            raise failure from error
        finally:
            self.num_ended += 1

    async def _turn(
        self,
        engine: Engine,
        version: int,
        checksums: Mapping[int, str],
        held_out: _HeldOut,
        number: int,
        tokens: tuple[int, ...],
    ) -> Completion:
        turns = held_out.turns
        room = turns.room(number, tokens, max_turns=self._max_turns, max_tokens=self._sampling.max_tokens)
        request = Request(
            id=-1 - held_out.index,
            version=version,
            prompt=tokens,
            seed=turn_seed(derived_seed(self._seed, "evaluation", held_out.index), number),
            sampling=replace(self._sampling, max_tokens=room),
            priority=PRIORITY,
            keep=number + 1 < self._max_turns,
        )
        try:
            completion = await engine.generate(request)
        except VersionNotResidentError as error:
            raise EngineError(f"it had confirmed version {version}, and says now: {error}") from error
        except StrettoError:
            raise
        except Exception as error:
            raise EngineError(f"it answered an evaluation with {type(error).__name__}: {error}") from error
        refuse_output(completion, request, checksums=checksums, vocabulary=self._vocabulary, continued=False)
        turns.add(tokens, completion)
        return completion

    def record(self, result: EvaluationResult, line: Mapping[str, Any] | None = None) -> None:
        """Records a result in the journal, when the core counts it; `line` is the one of `metrics.jsonl`."""
        self._journal.evaluation(
            result.version,
            result.moment,
            result.at,
            reward=result.score,
            num=result.num_scored,
            seconds=result.seconds,
            line=line,
        )


async def _outcomes(episodes: Sequence[Coroutine[Any, Any, float]]) -> list[float | Exception]:
    """Returns the reward or the error of each episode. Cancels all of them and raises the first `StalledError`."""

    async def outcome(episode: Coroutine[Any, Any, float]) -> float | Exception:
        try:
            return await episode
        except StalledError:
            raise
        except Exception as error:
            return error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(outcome(each), name="evaluation episode") for each in episodes]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
