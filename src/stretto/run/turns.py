"""The turns of an episode, and the one trajectory that they make. Pure functions and data.

A turn's context is the prompt and all tokens after it that were sampled or observed before the turn. It is the prompt
of the turn's request. So the tokens of a trajectory are those of its last context, without the prompt, and then those
of its last turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import index

import numpy as np
from numpy.typing import NDArray

from stretto.errors import RewardError, RoomError
from stretto.types import Completion, FinishReason, Supports


@dataclass(frozen=True, slots=True)
class Turn:
    """A context and the completion that followed it."""

    context: tuple[int, ...]
    completion: Completion

    @property
    def after(self) -> tuple[int, ...]:
        """The context and the tokens sampled after it."""
        return (*self.context, *self.completion.tokens.tolist())


@dataclass(slots=True)
class Turns:
    """The turns of an episode so far."""

    prompt: tuple[int, ...]
    done: list[Turn] = field(default_factory=list)
    cut: bool = False  # its environment asked for a turn when no token was left

    @classmethod
    def of(cls, prompt: Sequence[int], completion: Completion) -> Turns:
        """Returns the turns that a whole trajectory consists of."""
        prompt = tuple(prompt)
        if completion.turns is None:
            return cls(prompt, [Turn(prompt, completion)])
        tokens, spans = completion.tokens.tolist(), completion.turns.tolist()
        last = len(spans) - 1
        done = [
            Turn((*prompt, *tokens[:start]), _part(completion, start, end, completion.finish if n == last else "stop"))
            for n, (start, end) in enumerate(spans)
        ]
        return cls(prompt, done)

    def num_tokens_after(self, num_turns: int) -> int:
        """Tokens after the prompt, observed and sampled, when so many turns were done."""
        if not num_turns:
            return 0
        last = self.done[num_turns - 1]
        return len(last.context) + len(last.completion.tokens) - len(self.prompt)

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.completion.tokens) for turn in self.done)

    def get(self, number: int, tokens: Sequence[int]) -> Completion | None:
        """Returns turn `number` if it is done and the same context is asked for; else None."""
        done = number < len(self.done) and tuple(tokens) == self.done[number].context
        return self.done[number].completion if done else None

    def room(self, number: int, tokens: Sequence[int], *, max_turns: int, max_tokens: int) -> int:
        """Returns how many tokens turn `number`, the next one, may sample after the context `tokens`.

        Raises `RewardError` if `tokens` is not a context of that turn, and `RoomError` if no token is left.
        """
        if number >= max_turns:
            raise RewardError(
                f"the environment asked for turn {number}, counted from 0, and its episodes have {max_turns} at most: "
                "return, or raise `task.turns` if the task has it"
            )
        before = self.done[number - 1].after if number else self.prompt
        if tuple(tokens[: len(before)]) != before:
            raise RewardError(
                f"the environment asked for turn {number} with a context that does not begin with the {len(before)} "
                "tokens of the prompt and of all that was sampled and observed so far: hand over those and what is "
                "observed behind them"
            )
        left = max_tokens - (len(tokens) - len(self.prompt))
        if left < 1:
            self.cut = self.cut or number == len(self.done)
            raise RoomError(
                f"there is no room for turn {number}: {len(before) - len(self.prompt)} tokens follow the prompt, "
                f"{len(tokens) - len(before)} more are observed, and the limit is {max_tokens} "
                "(`rollout.max_tokens`); catch this error and return what was earned, or look at `policy.left` before"
            )
        if number < len(self.done):
            raise other_tokens(number)
        return left

    def add(self, tokens: Sequence[int], completion: Completion) -> None:
        """Adds a turn that is done."""
        self.done.append(Turn(tuple(tokens), completion))
        self.cut = False

    def whole(self) -> Completion:
        """Returns all turns as one completion. If there is one, right after the prompt, it is the engine's own."""
        first, last = self.done[0].completion, self.done[-1].completion
        finish: FinishReason = "length" if self.cut else last.finish
        if len(self.done) == 1 and self.done[0].context == self.prompt:
            return last if finish == last.finish else replace(last, finish=finish)
        starts = [len(turn.context) - len(self.prompt) for turn in self.done]
        ends = [len(turn.after) - len(self.prompt) for turn in self.done]
        tokens = np.array(self.done[-1].after[len(self.prompt) :], dtype=np.int32)
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        for turn, start, end in zip(self.done, starts, ends, strict=True):
            logprobs[start:end] = turn.completion.logprobs
        return Completion(
            id=last.id,
            version=last.version,
            tokens=tokens,
            logprobs=logprobs,
            finish=finish,
            checksum=last.checksum,
            token_versions=self._versions(starts, ends),
            started_at=first.started_at,
            finished_at=last.finished_at,
            prefilled=sum(turn.completion.prefilled for turn in self.done),
            supports=self._supports(tokens, starts, ends),
            turns=np.array([starts, ends], dtype=np.int32).T.copy(),
        )

    def _versions(self, starts: list[int], ends: list[int]) -> NDArray[np.int32] | None:
        """Returns the version of each token, if turns differ; observed tokens count with the turn that follows them."""
        parts, end_before = [], 0
        for turn, start, end in zip(self.done, starts, ends, strict=True):
            made = turn.completion
            own = np.full(end - start, made.version) if made.token_versions is None else made.token_versions
            parts += [np.full(start - end_before, own[0]), own]
            end_before = end
        versions = np.concatenate(parts).astype(np.int32)
        named = any(turn.completion.token_versions is not None for turn in self.done)
        return versions if named or len(np.unique(versions)) > 1 else None

    def _supports(self, tokens: NDArray[np.int32], starts: list[int], ends: list[int]) -> Supports | None:
        counts, members, end_before = [], [], 0
        for turn, start, end in zip(self.done, starts, ends, strict=True):
            drawn = turn.completion.supports
            if drawn is None:
                return None
            counts += [np.ones(start - end_before, dtype=np.int32), drawn.counts]
            members += [tokens[end_before:start], drawn.tokens]
            end_before = end
        return Supports(np.concatenate(counts), np.concatenate(members))


def token_ids(tokens: Sequence[int]) -> tuple[int, ...]:
    """Returns a context that an environment handed over. Raises `RewardError` if it is not all token ids."""
    try:
        return tuple(map(index, tokens))
    except TypeError as error:
        raise RewardError(
            f"the environment asked for a turn with a context that is not all token ids: {error}; hand over integers, "
            "as `tokenizer.encode` returns them"
        ) from error


def other_tokens(number: int) -> RewardError:
    """Returns the error for a turn that was asked for with another context before."""
    return RewardError(
        f"the environment asked for turn {number} with other tokens than the first time: an episode may be run again, "
        "so what it asks for must follow from the prompt and the turns before"
    )


def _part(completion: Completion, start: int, end: int, finish: FinishReason) -> Completion:
    """Returns one turn of a whole trajectory, as the engine made it except for its times."""
    versions, supports = completion.token_versions, completion.supports
    return replace(
        completion,
        tokens=completion.tokens[start:end],
        logprobs=completion.logprobs[start:end],
        finish=finish,
        token_versions=None if versions is None else versions[start:end],
        supports=None if supports is None else supports.at(np.arange(start, end)),
        turns=None,
    )
