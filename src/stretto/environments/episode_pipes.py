"""The messages between the pool of episodes and its worker processes, in the frames of `reward_pipes.py`.

A worker trusts its pool, so a message to it is a pickle. The pool does not trust a worker: the environment and its
imports run there. So a message from it consists of numbers and text at fixed places, and reading it executes nothing.

To a worker                                            from a worker, each with the number of its episode
`Play`    an episode to begin                          `Ask`       a turn: how many tokens of the lineage's context it
`Answer`  the turn that was asked for                              keeps, and those behind them
`Refuse`  the error instead of that turn               `Spent`     an amount, and what for
`Cancel`  an episode to end                            `Reported`  the reward so far
`Close`   the worker is to end                         `Ended`     the reward: one number, or one for each turn
                                                       `Failed`    an error text
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.environments.protocol import Outcome
from stretto.environments.reward_pipes import BrokenFrameError, as_text, framed, read_text
from stretto.types import Completion, Prompt

MAX_FRAME = 1 << 24  # bytes
MAX_TOKENS = (MAX_FRAME - 64) // 4  # of a context, beside what else is in its frame
MAX_LINEAGE = 2**31 - 1


# -- to a worker -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Play:
    episode: int
    prompt: Prompt
    left: int  # tokens
    budget: float


@dataclass(frozen=True, slots=True)
class Answer:
    episode: int
    completion: Completion
    left: int  # tokens


@dataclass(frozen=True, slots=True)
class Refuse:
    episode: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Cancel:
    episode: int


@dataclass(frozen=True, slots=True)
class Close:
    pass


ToWorker = Play | Answer | Refuse | Cancel | Close


# -- from a worker -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    episode: int
    lineage: int
    train: bool
    kept: int  # tokens of the context that both sides know
    tokens: Sequence[int]  # behind them; a worker passes an array of int32


@dataclass(frozen=True, slots=True)
class Spent:
    episode: int
    amount: float
    what: str


@dataclass(frozen=True, slots=True)
class Reported:
    episode: int
    reward: float | Outcome


@dataclass(frozen=True, slots=True)
class Ended:
    episode: int
    reward: float | Outcome


@dataclass(frozen=True, slots=True)
class Failed:
    episode: int
    reason: str


FromWorker = Ask | Spent | Reported | Ended | Failed

_KIND = struct.Struct("<Bq")  # and the episode
_ASK = struct.Struct("<qBI")  # lineage, train, kept
_AMOUNT = struct.Struct("<d")
_ASKED, _SPENT, _REPORTED, _REPORTED_TURNS, _ENDED, _ENDED_TURNS, _FAILED = range(1, 8)


def frame_of(message: FromWorker) -> bytes:
    """Returns the frame of a message from a worker."""
    match message:
        case Ask(episode, lineage, train, kept, tokens):
            return framed(_KIND.pack(_ASKED, episode) + _ASK.pack(lineage, train, kept) + array("i", tokens).tobytes())
        case Spent(episode, amount, what):
            return framed(_KIND.pack(_SPENT, episode) + _AMOUNT.pack(amount) + as_text(what))
        case Reported(episode, reward) | Ended(episode, reward):
            kind = _ENDED if isinstance(message, Ended) else _REPORTED
            if isinstance(reward, Outcome):
                return framed(_KIND.pack(kind + 1, episode) + struct.pack(f"<{len(reward.turns)}d", *reward.turns))
            return framed(_KIND.pack(kind, episode) + _AMOUNT.pack(reward))
        case Failed(episode, reason):
            return framed(_KIND.pack(_FAILED, episode) + as_text(reason))


def read_message(body: bytes) -> FromWorker:
    """Returns the message of a frame. Raises `BrokenFrameError` for anything else."""
    try:
        kind, episode = _KIND.unpack_from(body)
        rest = body[_KIND.size :]
        if kind == _ASKED:
            lineage, train, kept = _ASK.unpack_from(rest)
            return Ask(episode, lineage, train == 1, kept, _tokens(rest[_ASK.size :]))
        if kind == _SPENT:
            return Spent(episode, _AMOUNT.unpack_from(rest)[0], read_text(rest[_AMOUNT.size :]))
        if kind in (_REPORTED, _ENDED):
            (reward,) = _AMOUNT.unpack(rest)
            return Ended(episode, reward) if kind == _ENDED else Reported(episode, reward)
        if kind in (_REPORTED_TURNS, _ENDED_TURNS):
            outcome = Outcome(struct.unpack(f"<{len(rest) // _AMOUNT.size}d", rest))
            return Ended(episode, outcome) if kind == _ENDED_TURNS else Reported(episode, outcome)
        if kind == _FAILED:
            return Failed(episode, read_text(rest))
    except struct.error as error:
        raise BrokenFrameError(f"a frame of {len(body)} bytes that holds no message") from error
    raise BrokenFrameError(f"a frame of {len(body)} bytes that holds no message")


def _tokens(data: bytes) -> tuple[int, ...]:
    tokens = array("i")  # of four bytes, in the order of this machine, which both sides run on
    if len(data) % tokens.itemsize:
        raise BrokenFrameError(f"a context whose tokens are {len(data)} bytes")
    tokens.frombytes(data)
    return tuple(tokens)


def common_length(known: Sequence[int], context: Sequence[int]) -> int:
    """Returns the number of tokens that two contexts, both tuples or both arrays, have in common at their beginning."""
    if context[: len(known)] == known:
        return len(known)
    return next(place for place, token in enumerate(known) if place >= len(context) or context[place] != token)
