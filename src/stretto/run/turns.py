"""The turns of an episode, and the lineages that they make. Pure functions and data.

A lineage begins with a context: the prompt of the group or, if its first turn has another one, that of this turn. A
turn's context is that and all tokens after it that were sampled or observed before the turn. It is the prompt of the
turn's request. So the tokens of a lineage are those of its last context, without the first, and then those of its last
turn. Turns are numbered over all lineages, in the order in which they were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.errors import RewardError, RoomError
from stretto.types import Completion, FinishReason, Lineage, Supports


@dataclass(frozen=True, slots=True)
class Turn:
    """A context and the completion that followed it."""

    context: tuple[int, ...]
    completion: Completion
    lineage: int = 0
    train: bool = True  # as its lineage

    @property
    def after(self) -> tuple[int, ...]:
        """The context and the tokens sampled after it."""
        return (*self.context, *self.completion.tokens.tolist())


@dataclass(slots=True)
class Turns:
    """The turns of an episode so far."""

    prompt: tuple[int, ...]
    done: list[Turn] = field(default_factory=list)
    cut: set[int] = field(default_factory=set)  # lineages in which a turn was asked for when no token was left

    @classmethod
    def of(cls, prompt: Sequence[int], lineages: Sequence[Lineage]) -> Turns:
        """Returns the turns that a whole trajectory consists of."""
        done: dict[int, Turn] = {}
        for number, lineage in enumerate(lineages):
            made, context = lineage.completion, lineage.context
            if made.turns is None:
                turns = [Turn(context, made, number, lineage.train)]
            else:
                tokens, spans = made.tokens.tolist(), made.turns.tolist()
                last = len(spans) - 1
                parts = [
                    (start, _part(made, start, end, made.finish if place == last else "stop", len(context)))
                    for place, (start, end) in enumerate(spans)
                ]
                turns = [Turn((*context, *tokens[:start]), part, number, lineage.train) for start, part in parts]
            done |= zip(lineage.turn_numbers or range(len(turns)), turns, strict=True)
        return cls(tuple(prompt), [done[number] for number in sorted(done)])

    @property
    def num_lineages(self) -> int:
        return _num_lineages(self.done)

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.completion.tokens) for turn in self.done)

    def first_context(self, lineage: int) -> tuple[int, ...]:
        """The context that a lineage begins with; what follows it is sampled or observed."""
        return self._first_context(lineage, next(turn.context for turn in self.done if turn.lineage == lineage))

    def _first_context(self, lineage: int, context: tuple[int, ...]) -> tuple[int, ...]:
        """The part of a lineage's first turn's context that the lineage begins with."""
        begins_with_prompt = lineage == 0 and context[: len(self.prompt)] == self.prompt
        return self.prompt if begins_with_prompt else context

    def num_tokens_after(self, num_turns: int) -> int:
        """Tokens of lineage 0 after its first context, observed and sampled, when so many turns were done."""
        own = [turn for turn in self.done[:num_turns] if turn.lineage == 0]
        if not own:
            return 0
        return len(own[-1].context) + len(own[-1].completion.tokens) - len(self.first_context(0))

    def left(self, num_turns: int, *, max_tokens: int, max_context: int | None = None) -> int:
        """Tokens that may follow in lineage 0, observed or sampled, when so many turns were done."""
        most = max_tokens
        if num_turns and (first := self.first_context(0)) is not self.prompt:
            most = self._limit(first, max_tokens, max_context) - len(first)
        return max(0, most - self.num_tokens_after(num_turns))

    def _limit(self, first: tuple[int, ...], max_tokens: int, max_context: int | None) -> int:
        """The most tokens of a lineage that begins with `first`, context included."""
        limit = len(first) + max_tokens
        return limit if max_context is None or first is self.prompt else min(limit, max_context)

    def get(self, number: int, tokens: Sequence[int], lineage: int = 0, train: bool = True) -> Completion | None:
        """Returns turn `number` if it is done and the same is asked for; else None."""
        if number >= len(self.done):
            return None
        done = self.done[number]
        same = (tuple(tokens), lineage, train) == (done.context, done.lineage, done.train)
        return done.completion if same else None

    def room(
        self,
        number: int,
        tokens: Sequence[int],
        lineage: int = 0,
        train: bool = True,
        *,
        max_turns: int,
        max_tokens: int,
        max_lineages: int = 1,
        max_context: int | None = None,
    ) -> int:
        """Returns how many tokens turn `number`, the next one, may sample after the context `tokens`.

        Turns that are done from `number` on are left out of account. Raises `RewardError` if `tokens` is not a context
        of that turn in its lineage, and `RoomError` if no token is left.
        """
        if number >= max_turns:
            raise RewardError(
                f"the environment asked for turn {number}, counted from 0, and its episodes have {max_turns} at most: "
                "return, or raise `task.turns` if the task has it"
            )
        context = tuple(tokens)
        own = [turn for turn in self.done[:number] if turn.lineage == lineage]
        if own:
            first, before = self._first_context(lineage, own[0].context), own[-1].after
            _refuse_other_beginning(number, context, own[-1], train, before)
        else:
            self._refuse_to_open(number, context, lineage, max_lineages)
            first = before = self._first_context(lineage, context)
        limit = self._limit(first, max_tokens, max_context)
        if len(context) >= limit:
            if own and number == len(self.done):
                self.cut.add(lineage)
            own_context = "" if first is self.prompt else f"the {len(first)} tokens that lineage {lineage} begins with"
            raise _no_room(number, len(first), len(before), len(context), max_tokens, limit, own_context)
        return limit - len(context)

    def _refuse_to_open(self, number: int, context: tuple[int, ...], lineage: int, max_lineages: int) -> None:
        """Raises `RewardError` if turn `number` cannot be the first of `lineage`."""
        count = _num_lineages(self.done[:number])
        if lineage != count:
            raise RewardError(
                f"the environment asked for turn {number} in lineage {lineage!r}, and its episode has {count} so far, "
                f"counted from 0: continue one of those, or open the next with `lineage={count}`"
            )
        if count >= max_lineages:
            raise RewardError(
                f"the environment opened lineage {lineage}, counted from 0, and its episodes have {max_lineages} at "
                "most: continue one of them, or raise `task.lineages` if the task has it"
            )
        if not context:
            raise RewardError(
                f"the environment opened lineage {lineage} with an empty context: hand over at least one token"
            )

    def is_full(self, *, max_turns: int, max_lineages: int) -> bool:
        """True if no other turn can follow: its turns are used up, or the tokens of all lineages that it may have."""
        if len(self.done) >= max_turns:
            return True
        last = {turn.lineage: turn.completion for turn in self.done}
        return len(last) >= max_lineages and all(made.finish == "length" for made in last.values())

    @property
    def is_cut(self) -> bool:
        """True if a lineage ends at the limit of tokens."""
        last = {turn.lineage: turn.completion for turn in self.done}
        return bool(self.cut) or any(made.finish == "length" for made in last.values())

    def add(self, tokens: Sequence[int], completion: Completion, lineage: int = 0, train: bool = True) -> None:
        """Adds a turn that is done."""
        self.done.append(Turn(tuple(tokens), completion, lineage, train))
        self.cut.discard(lineage)

    def discard(self, number: int) -> None:
        """Forgets turn `number` and those after it."""
        del self.done[number:]
        self.cut.intersection_update(range(self.num_lineages))

    def lineages(self) -> tuple[Lineage, ...]:
        """Returns the lineages that the turns make."""
        count = self.num_lineages
        found = []
        for lineage in range(count):
            numbers = [number for number, turn in enumerate(self.done) if turn.lineage == lineage]
            found.append(
                Lineage(
                    self.first_context(lineage),
                    self.whole(lineage),
                    self.done[numbers[0]].train,
                    turn_numbers=tuple(numbers) if count > 1 else None,
                )
            )
        return tuple(found)

    def whole(self, lineage: int = 0) -> Completion:
        """Returns all turns of a lineage as one completion.

        If there is one, right after the first context, it is the engine's own.
        """
        done, offset = [turn for turn in self.done if turn.lineage == lineage], len(self.first_context(lineage))
        first, last = done[0].completion, done[-1].completion
        finish: FinishReason = "length" if lineage in self.cut else last.finish
        if len(done) == 1 and len(done[0].context) == offset:
            return last if finish == last.finish else replace(last, finish=finish)
        starts = [len(turn.context) - offset for turn in done]
        ends = [len(turn.after) - offset for turn in done]
        tokens = np.array(done[-1].after[offset:], dtype=np.int32)
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        for turn, start, end in zip(done, starts, ends, strict=True):
            logprobs[start:end] = turn.completion.logprobs
        return Completion(
            id=last.id,
            version=last.version,
            tokens=tokens,
            logprobs=logprobs,
            finish=finish,
            checksum=last.checksum,
            token_versions=_versions(done, starts, ends),
            started_at=first.started_at,
            finished_at=last.finished_at,
            prefilled=sum(turn.completion.prefilled for turn in done),
            supports=_supports(done, tokens, starts, ends),
            turns=np.array([starts, ends], dtype=np.int32).T.copy(),
            receipts=tuple(dict.fromkeys(id for turn in done for id in turn.completion.receipts)),
            routing=_routing(done),
        )


def _num_lineages(turns: Sequence[Turn]) -> int:
    return 1 + max((turn.lineage for turn in turns), default=-1)


def _refuse_other_beginning(
    number: int, context: tuple[int, ...], last: Turn, train: bool, before: tuple[int, ...]
) -> None:
    """Raises `RewardError` if turn `number` does not continue the lineage whose last turn is `last`."""
    if context[: len(before)] != before:
        where = f" of lineage {last.lineage}" if last.lineage else ""
        raise RewardError(
            f"the environment asked for turn {number}{where} with a context that does not begin with the {len(before)} "
            "tokens of the prompt and of all that was sampled and observed so far: hand over those and what is "
            "observed behind them, or open another lineage"
        )
    if train != last.train:
        raise RewardError(
            f"the environment asked for turn {number} with `train={train}` in lineage {last.lineage}, which it opened "
            f"with `train={last.train}`: ask with the same, or open another lineage"
        )


def _no_room(
    number: int, first: int, before: int, context: int, max_tokens: int, limit: int, own_context: str
) -> RoomError:
    """Returns the error for a context of so many tokens; the lineage begins with `first` of them and has `before`."""
    most = f"{max_tokens} (`rollout.max_tokens`)"
    if limit < first + max_tokens:
        most = f"{limit} in all (the longest prompt plus `rollout.max_tokens`)"
    return RoomError(
        f"there is no room for turn {number}: {before - first} tokens follow {own_context or 'the prompt'}, "
        f"{context - before} more are observed, and the limit is {most}; catch this error and return what was earned "
        "or open another lineage, or look at `policy.left` before"
    )


def _versions(turns: Sequence[Turn], starts: list[int], ends: list[int]) -> NDArray[np.int32] | None:
    """Returns the version of each token, if turns differ; observed tokens count with the turn that follows them."""
    parts, end_before = [], 0
    for turn, start, end in zip(turns, starts, ends, strict=True):
        made = turn.completion
        own = np.full(end - start, made.version) if made.token_versions is None else made.token_versions
        parts += [np.full(start - end_before, own[0]), own]
        end_before = end
    versions = np.concatenate(parts).astype(np.int32)
    named = any(turn.completion.token_versions is not None for turn in turns)
    return versions if named or len(np.unique(versions)) > 1 else None


def _supports(turns: Sequence[Turn], tokens: NDArray[np.int32], starts: list[int], ends: list[int]) -> Supports | None:
    counts, members, end_before = [], [], 0
    for turn, start, end in zip(turns, starts, ends, strict=True):
        drawn = turn.completion.supports
        if drawn is None:
            return None
        counts += [np.ones(start - end_before, dtype=np.int32), drawn.counts]
        members += [tokens[end_before:start], drawn.tokens]
        end_before = end
    return Supports(np.concatenate(counts), np.concatenate(members))


def _routing(turns: Sequence[Turn]) -> NDArray[Any] | None:
    """Returns the experts of all tokens but the last, each as it was first computed."""
    parts, known = [], 0
    for turn in turns:
        record = turn.completion.routing
        if record is None:
            return None
        parts.append(record[known:])
        known = len(record)
    return np.concatenate(parts)


def _part(completion: Completion, start: int, end: int, finish: FinishReason, context: int) -> Completion:
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
        routing=None if completion.routing is None else completion.routing[: context + end - 1],
    )
