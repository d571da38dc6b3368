"""Makes typed values of the rows of a journal. A value that does not fit is a `ValueError` or a `TypeError`."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from stretto.store.blobs import read_parts, sampled_values
from stretto.store.routing_files import read_record
from stretto.store.schema import UNDECODABLE
from stretto.types import Completion, HeldOutScore, Lineage, Sample, Supports

R = TypeVar("R")

# Columns of a completion `c`, and of a lineage of a group `g`.
_COMPLETION = (
    "c.version, c.tokens, c.logprobs, c.finish, c.checksum, c.token_versions, c.started_at, c.finished_at, "
    "c.prefilled, c.supports, c.turns, c.receipts, c.routing"
)
LINEAGE = f"c.lineage, COALESCE(c.context, g.prompt_tokens), c.train, c.turn_numbers, {_COMPLETION}"


@contextmanager
def naming(trajectory: int) -> Iterator[None]:
    """Names the trajectory whose values cannot be decoded."""
    try:
        yield
    except UNDECODABLE as error:
        raise ValueError(f"trajectory {trajectory}: {error}") from error


def read_sample(
    run: Path,
    trajectory: int,
    group: int,
    version: int,
    reward: Any,
    use: int,
    by_turn: bytes | None,
    parts: str | None,
    number: int,
    task: str | None,
    _: int | None,
    *made: Any,
) -> Sample:
    """Returns a sample of a batch from its columns, the last of them `LINEAGE`.

    Raises `ValueError` with its trajectory if they do not agree, or if its lineage is not to be trained.
    """
    with naming(trajectory):
        lineage, rewards = read_lineage(run, trajectory, number, made), read_rewards(by_turn)
        completion, numbers = lineage.completion, lineage.turn_numbers
        if not lineage.train:
            raise ValueError(f"its lineage {number} is not to be trained")
        if rewards is not None and numbers is None and len(rewards) != len(completion.turn_lengths):
            raise ValueError(f"it has {len(completion.turn_lengths)} turns and {len(rewards)} rewards")
        if rewards is not None and numbers is not None and numbers[-1] >= len(rewards):
            raise ValueError(f"it has a turn {numbers[-1]} and {len(rewards)} rewards")
        return typed(
            Sample(
                trajectory, group, version, list(lineage.context), completion, read_reward(reward), use, rewards,
                lineage=number, turn_numbers=numbers, reward_parts=read_parts(parts), task=task,
            )
        )  # fmt: skip


def read_lineage(run: Path, trajectory: int, number: int, row: Sequence[Any]) -> Lineage:
    """Returns a lineage from the columns `LINEAGE` without its number. Raises like `_completion`.

    Its record of routing comes from its file, if that is still there.
    """
    context, train, turn_numbers, *made, routing = row
    completion = _completion(trajectory, made)
    if routing is not None:
        completion = replace(completion, routing=read_record(run, trajectory, number, routing))
    numbers = None if turn_numbers is None else tuple(np.frombuffer(turn_numbers, "<i4").tolist())
    if train not in (0, 1):
        raise ValueError(f"`train` is {reprlib.repr(train)}")
    if numbers is not None and (len(numbers) != len(completion.turn_lengths) or list(numbers) != sorted(set(numbers))):
        raise ValueError(f"it has {len(completion.turn_lengths)} turns in a lineage, with the numbers {list(numbers)}")
    return Lineage(tuple(np.frombuffer(context, "<i4").tolist()), completion, bool(train), numbers)


def read_reward(value: Any) -> float:
    """Returns a reward. Raises `ValueError` if it is no finite number."""
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(f"its reward is {reprlib.repr(value)}")
    return value


def _completion(trajectory: int, row: Sequence[Any]) -> Completion:
    """Returns a completion from the columns `_COMPLETION` without its routing.

    Raises `ValueError` or `TypeError` if they do not agree.
    """
    version, tokens, logprobs, finish, checksum, token_versions, started_at, finished_at, prefilled = row[:9]
    supports, turns, receipts = row[9:]
    made = Completion(
        id=trajectory,
        version=version,
        tokens=np.frombuffer(tokens, "<i4").astype(np.int32),
        logprobs=np.frombuffer(logprobs, "<f4").astype(np.float32),
        finish=finish,
        checksum=checksum,
        token_versions=None if token_versions is None else np.frombuffer(token_versions, "<i4").astype(np.int32),
        started_at=started_at,
        finished_at=finished_at,
        prefilled=prefilled,
        supports=None if supports is None else _supports(np.frombuffer(supports, "<i4"), len(tokens) // 4),
        turns=None if turns is None else np.frombuffer(turns, "<i4").astype(np.int32).reshape(-1, 2),
        receipts=() if receipts is None else tuple(json.loads(receipts)),
    )
    num_tokens = len(made.tokens)
    for name in ("logprobs", "token_versions"):
        array = getattr(made, name)
        if array is not None and len(array) != num_tokens:
            raise ValueError(f"it has {num_tokens} tokens and {len(array)} `{name}`")
    if made.turns is not None:
        ends = [0, *made.turns.reshape(-1).tolist(), num_tokens]
        if len(made.turns) == 0 or ends != sorted(ends):
            raise ValueError(f"its turns are not in {num_tokens} tokens")
    return typed(made)


def oldest_version(token_versions: bytes, turns: bytes | None) -> int:
    """The oldest version of a sampled token."""
    return int(sampled_values(np.frombuffer(token_versions, "<i4"), turns).min())


def read_rewards(by_turn: bytes | None) -> tuple[float, ...] | None:
    """Returns the rewards of the turns of a trajectory; None if it has none."""
    return None if by_turn is None else tuple(np.frombuffer(by_turn, "<f8").tolist())


def _supports(values: NDArray[np.int32], num_tokens: int) -> Supports:
    made = Supports(values[:num_tokens].astype(np.int32), values[num_tokens:].astype(np.int32))
    if len(made.counts) != num_tokens or (made.counts < 1).any() or made.counts.sum() != len(made.tokens):
        raise ValueError(f"its supports are not those of {num_tokens} tokens")
    return made


def read_greedy(line: str | None) -> HeldOutScore | None:
    """Returns the greedy score that the line of an evaluation has; None if it has none."""
    found = None if line is None else read_mapping(line).get("greedy")
    return None if found is None else typed(HeldOutScore(*(found[each.name] for each in fields(HeldOutScore))))


def read_task_scores(line: str | None) -> dict[str, float | None]:
    """Returns the score of each task that the line of an evaluation has."""
    found = {} if line is None else read_mapping(line)
    return {
        name.split("/")[1]: value
        for name, value in found.items()
        if name.startswith("task/") and name.endswith("/score") and isinstance(value, float | int | None)
    }


def read_mapping(text: str) -> dict[str, Any]:
    """Returns an object of JSON. Raises `ValueError` for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{reprlib.repr(text)} is not an object")
    return value


def typed(record: R) -> R:
    """Returns a record. Raises `TypeError` if a value has another type than its field: SQLite may store any value."""
    kind: Any = type(record)
    for name, kinds in _kinds(kind).items():
        if not isinstance(value := getattr(record, name), kinds):
            raise TypeError(f"`{name}` is {reprlib.repr(value)}")
    return record


@cache
def _kinds(record: type[Any]) -> dict[str, tuple[type, ...]]:
    """Returns the types of the fields that are numbers and texts, and may be None."""
    plain: dict[Any, tuple[type, ...]] = {
        int: (int,), float: (float, int), str: (str,), bool: (bool,), type(None): (type(None),)
    }  # fmt: skip
    hints = {
        name: get_args(hint) if get_origin(hint) is UnionType else (hint,)
        for name, hint in get_type_hints(record).items()
    }
    return {
        name: tuple(kind for each in parts for kind in plain[each])
        for name, parts in hints.items()
        if all(each in plain for each in parts)
    }
