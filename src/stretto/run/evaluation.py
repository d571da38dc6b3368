"""Evaluation of one version on held-out prompts, at low priority, while rollouts continue.

An evaluation answers every prompt once at its temperature and, with `greedy`, once more at temperature 0. All answers
are generated together, so that they share one tail. They make one result, with a score for each of the two ways:

- *Whole or not at all.* A result is recorded when every answer has ended. An evaluation that was interrupted, or whose
  instance was lost, has no result. It is made again with all of its answers, or skipped.
- *Apart.* An answer that fails is counted in its own way and changes nothing in the other. With or without the greedy
  answers, the sampled ones have the same prompts and seeds.
- *Never trained on.* The core knows only that a version is evaluated. The journal has the result, and the answers in a
  table of their own. No answer is a trajectory: the ids of requests are negative.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from stretto import clock
from stretto.engines.protocol import Engine
from stretto.environments.function_specs import last_line
from stretto.environments.mixed_prompts import HeldOut
from stretto.environments.protocol import Earned, earned
from stretto.environments.single_turn import Decode
from stretto.errors import EngineError, RequestError, RewardError, StalledError, StrettoError, VersionNotResidentError
from stretto.run.episodes import Episode, TakeTurn
from stretto.run.first_reward import FirstReward
from stretto.run.output_checks import refuse_output
from stretto.run.seeds import derived_seed, turn_seed
from stretto.run.task_play import Tasks, play_of
from stretto.run.turns import Turns
from stretto.store.journal import Journal
from stretto.types import (
    Completion,
    EvaluationResult,
    HeldOutAnswer,
    HeldOutScore,
    Lineage,
    Moment,
    Prompt,
    Receipt,
    Request,
    Sampling,
    TaskScore,
    part_means,
)

log = logging.getLogger(__name__)

PRIORITY = 1  # after everything that trains


@dataclass(slots=True, eq=False)
class _HeldOut:
    """One prompt of an evaluation that is answered in one way, and the turns of its episode so far."""

    id: int  # of its requests; negative
    index: int
    prompt: Prompt
    sampling: Sampling
    is_greedy: bool = False  # a second answer, beside the one at the evaluation's temperature
    turns: Turns = field(init=False)
    # When it has ended, and if answers are kept.
    lineages: tuple[Lineage, ...] = ()
    texts: tuple[str, ...] = ()
    contexts: tuple[str | None, ...] = ()

    def __post_init__(self) -> None:
        self.turns = Turns(self.prompt.tokens)


class Evaluator:
    """Answers the same held-out prompts with the same seeds under any version."""

    def __init__(
        self,
        prompts: HeldOut,
        count: int,
        *,
        tasks: Tasks,
        seed: int,
        journal: Journal,
        greedy: bool = False,
        vocabulary: int | None = None,
        first_reward: FirstReward | None = None,
        decode: Decode | None = None,
    ) -> None:
        """`tasks`: how episodes are played, by the labels of the prompts' tasks.

        `greedy`: answers every prompt a second time, at temperature 0; the others must then have another.

        `decode`: turns tokens into the text that the journal keeps of each answer; None: it keeps no answers.

        `vocabulary`: size, an engine may answer with smaller token ids only; None: any.
        """
        self._prompts = prompts
        self._count = count
        self._play_of = play_of(tasks)
        self._greedy = greedy
        self._seed = seed
        self._journal = journal
        self._vocabulary = vocabulary
        self._first_reward = first_reward or FirstReward()
        self._decode = decode
        self._answers: tuple[EvaluationResult, list[HeldOutAnswer]] | None = None  # of the last evaluation
        self.num_ended = 0  # episodes, scored or failed, of all evaluations

    @property
    def num_answers(self) -> int:
        """The episodes of one evaluation."""
        return self._count * (2 if self._greedy else 1)

    async def evaluate(
        self, engine: Engine, version: int, moment: Moment, checksum: str | None = None
    ) -> EvaluationResult:
        """Evaluates `version`, which must be resident on `engine`. A failed request or reward is counted, not scored.

        Raises `EngineError` if the engine fails, or answers for something else than it was asked for. If a `checksum`
        is given, an answer of other weights is that too. Raises `StalledError` if nothing could ever be scored.
        """
        started = clock.now()
        checksums = {} if checksum is None else {version: checksum}
        prompts = [self._prompts.prompt(index) for index in range(self._count)]
        sampled = [
            _HeldOut(-1 - index, index, prompt, self._play_of(prompt.task).sampling)
            for index, prompt in enumerate(prompts)
        ]
        greedy = []
        if self._greedy:
            greedy = [
                _HeldOut(
                    each.id - self._count, each.index, each.prompt, replace(each.sampling, temperature=0.0), True
                )
                for each in sampled
            ]  # fmt: skip
        answers = [*sampled, *greedy]
        episodes = [self._episode(each, partial(self._turn, engine, version, checksums, each)) for each in answers]
        outcomes = await _outcomes(episodes)
        of_sampled = _score(sampled, outcomes[: self._count], f"in the evaluation of version {version}")
        of_greedy = _score(greedy, outcomes[self._count :], f"in the greedy evaluation of version {version}")
        ended = clock.now()
        result = EvaluationResult(
            version=version,
            moment=moment,
            score=of_sampled.score,
            num_scored=of_sampled.num_scored,
            num_failed=of_sampled.num_failed,
            mean_tokens=of_sampled.mean_tokens,
            at=ended,
            seconds=ended - started,
            greedy=of_greedy if self._greedy else None,
            rewards=_means(outcomes[: self._count]),
            tasks=_by_task(sampled, outcomes[: self._count], greedy, outcomes[self._count :]),
        )
        self._answers = (result, [_answer(*each) for each in zip(answers, outcomes, strict=True)])
        return result

    async def _episode(self, held_out: _HeldOut, take_turn: TakeTurn) -> Earned:
        play = self._play_of(held_out.prompt.task)
        episode = Episode(
            held_out.turns, take_turn,
            max_tokens=held_out.sampling.max_tokens, max_context=play.max_context, deadline_s=play.episode_s,
            seconds=play.cut_s, budget=play.budget,
        )  # fmt: skip
        try:
            outcome = await episode.play(play.environment, held_out.prompt)
            found = earned(outcome, len(held_out.turns.done))
            self._first_reward.scored()
            return found
        except StrettoError as error:
            if isinstance(error, RewardError):
                self._first_reward.failed(held_out.id, -1 - held_out.index, error, held_out.prompt.task)
            raise
        except Exception as error:
            failure = RewardError(last_line(error))
            self._first_reward.failed(held_out.id, -1 - held_out.index, failure, held_out.prompt.task)
            raise failure from error
        finally:
            self.num_ended += 1
            self._keep_text(held_out)

    def _keep_text(self, held_out: _HeldOut) -> None:
        """Makes the text of an answer as it ends: all of them at once would block the loop."""
        if self._decode is None:
            return
        held_out.lineages = held_out.turns.lineages() if held_out.turns.done else ()
        prompt = tuple(held_out.prompt.tokens)
        held_out.texts = tuple(self._decode(each.completion.tokens.tolist()) for each in held_out.lineages)
        held_out.contexts = tuple(
            None if each.context == prompt else self._decode(each.context) for each in held_out.lineages
        )

    async def _turn(
        self,
        engine: Engine,
        version: int,
        checksums: Mapping[int, str],
        held_out: _HeldOut,
        number: int,
        tokens: tuple[int, ...],
        lineage: int,
        train: bool,
    ) -> Completion:
        turns, sampling, play = held_out.turns, held_out.sampling, self._play_of(held_out.prompt.task)
        room = turns.room(
            number, tokens, lineage, train, max_turns=play.max_turns, max_tokens=sampling.max_tokens,
            max_lineages=play.max_lineages, max_context=play.max_context,
        )  # fmt: skip
        request = Request(
            id=held_out.id,
            version=version,
            prompt=tokens,
            seed=turn_seed(derived_seed(self._seed, "evaluation", held_out.index), number),
            sampling=replace(sampling, max_tokens=room),
            priority=PRIORITY,
            keep=number + 1 < play.max_turns,
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
        turns.add(tokens, completion, lineage, train)
        return completion

    def record_receipt(self, instance: int, receipt: Receipt) -> None:
        """Records that an engine gave a receipt for the version that it evaluates."""
        self._journal.receipt_given(instance, receipt, at=clock.now())

    def record(self, result: EvaluationResult, line: Mapping[str, Any] | None = None) -> None:
        """Records a result in the journal, when the core counts it.

        `line` is the one of `metrics.jsonl`. In the journal, only `line` has the greedy score.
        """
        self._journal.evaluation(
            result.version,
            result.moment,
            result.at,
            reward=result.score,
            num=result.num_scored,
            seconds=result.seconds,
            line=line,
            answers=self._answers_of(result),
        )

    def _answers_of(self, result: EvaluationResult) -> Sequence[HeldOutAnswer]:
        """Returns the answers of the last evaluation, if this is its result."""
        kept, self._answers = self._answers, None
        return kept[1] if self._decode is not None and kept is not None and kept[0] is result else ()


def _answer(held_out: _HeldOut, outcome: Earned | Exception) -> HeldOutAnswer:
    reward, error, parts = None, None, None
    if isinstance(outcome, Exception):
        error = str(outcome)
    else:
        reward, parts = outcome.reward, outcome.parts
    return HeldOutAnswer(
        held_out.index, held_out.prompt, held_out.is_greedy, held_out.lineages, held_out.texts, held_out.contexts,
        reward=reward, error=error, reward_parts=parts,
    )  # fmt: skip


def _means(outcomes: Sequence[Earned | Exception]) -> dict[str, float] | None:
    """Returns the mean of each reward; None if the task has one."""
    parts = [outcome.parts for outcome in outcomes if isinstance(outcome, Earned)]
    return part_means(parts) if any(own is not None for own in parts) else None


def _score(answers: Sequence[_HeldOut], outcomes: Sequence[Earned | Exception], where: str) -> HeldOutScore:
    """Returns the score of answers with these outcomes. Raises an error that is no failure.

    Logs what failed, unless `where` is empty.
    """
    rewards: list[float] = []
    failures: list[RewardError | RequestError] = []
    for outcome in outcomes:
        if isinstance(outcome, RewardError | RequestError):
            failures.append(outcome)
            continue
        if isinstance(outcome, Exception):
            raise outcome
        rewards.append(outcome.reward)
    if failures and where:
        failed = f"{len(failures)} of {len(outcomes)} held-out prompts failed"
        log.warning("%s %s, the first of them: %s", failed, where, failures[0])
    lengths = [each.turns.num_sampled for each in answers if each.turns.done]
    return HeldOutScore(
        score=sum(rewards) / len(rewards) if rewards else None,
        num_scored=len(rewards),
        num_failed=len(failures),
        mean_tokens=sum(lengths) / len(lengths) if lengths else 0.0,
    )


def _by_task(
    sampled: Sequence[_HeldOut],
    outcomes: Sequence[Earned | Exception],
    greedy: Sequence[_HeldOut],
    greedy_outcomes: Sequence[Earned | Exception],
) -> dict[str, TaskScore]:
    """Returns the scores of each task that has a label."""

    def score(label: str, answers: Sequence[_HeldOut], of: Sequence[Earned | Exception]) -> HeldOutScore:
        own = [place for place, each in enumerate(answers) if each.prompt.task == label]
        return _score([answers[place] for place in own], [of[place] for place in own], "")

    labels = dict.fromkeys(each.prompt.task for each in sampled if each.prompt.task is not None)
    return {
        label: TaskScore(score(label, sampled, outcomes), score(label, greedy, greedy_outcomes) if greedy else None)
        for label in labels
    }


async def _outcomes(episodes: Sequence[Coroutine[Any, Any, Earned]]) -> list[Earned | Exception]:
    """Returns what each episode has earned, or its error. Cancels all of them and raises the first `StalledError`."""

    async def outcome(episode: Coroutine[Any, Any, Earned]) -> Earned | Exception:
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
