"""The frames on the two pipes between the pool and a reward worker: a length, then that many bytes.

A worker trusts its pool, so a request is a pickle: rows may hold any type. The pool does not trust a worker: the
reward function and its imports run there and can write anything to the pipe. So a reply consists of numbers and text at
fixed places. Reading it executes nothing, and the pool checks a whole frame before it uses any part of it.

    greeting   the reply to the first request, which names the rewards: one byte of bits (1: one of them is async; 2,
               4, 8: the details that they need; 32: one of them is batched), then the form of each as text, one a line;
               or, if that bit (16) is set, an error text: they cannot be used
    results    the number of scored items and of errors; the ids of the scored, their scores (one for each reward, NaN
               if it does not apply); the ids of the errors, their lengths in bytes, their texts. Each id is of an item
               that the worker has, and occurs once.

Imports only the standard library: reward workers load this module.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from stretto.environments.reward_calls import Details
from stretto.environments.reward_range import is_trainable

LENGTH = struct.Struct("<Q")
MAX_REASON = 8_000  # bytes of an error text
_COUNTS = struct.Struct("<II")  # scored items, errors
_ASYNC, _ERROR, _BATCHED = 1, 16, 32  # bits of a greeting; between the first two are those of the details

Item = tuple[int, str, str, Mapping[str, Any], Details | None]  # id, prompt, completion, row, details
Scores = tuple[float, ...]  # of each reward, in their order; NaN: the reward does not apply
Result = tuple[int, Scores | None, str | None]  # id, scores or error


@dataclass(frozen=True, slots=True)
class Greeting:
    """The rewards as a worker has made them."""

    error: str | None = None  # why they cannot be used
    asynchronous: bool = False  # one of them is async
    batched: bool = False  # one of them is called with batches
    wants: int = 0  # the details that they need, as bits
    forms: tuple[str, ...] = ()  # how each is called


class BrokenFrameError(Exception):
    """Bytes on the pipe from a worker that are not a valid frame."""


def request_frame(message: Any) -> bytes:
    """Returns the frame of a message to a worker. Passes on what pickling the message raises."""
    return framed(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def greeting_frame(error: str | None, flag: bool) -> bytes:
    """Returns the first frame of a worker of episodes: why it cannot be used (or None), and a flag."""
    return framed(bytes([flag]) + (b"" if error is None else as_text(error)))


def read_greeting(body: bytes) -> tuple[str | None, bool]:
    """Returns the arguments of `greeting_frame`. Raises `BrokenFrameError` for an invalid frame."""
    if body[:1] not in (b"\0", b"\1"):
        raise BrokenFrameError(f"a frame of {len(body)} bytes that is not a greeting")
    return read_text(body[1:]) or None, body[0] == 1


def reward_greeting_frame(greeting: Greeting) -> bytes:
    """Returns the first frame of a reward worker."""
    bits = _ASYNC * greeting.asynchronous | greeting.wants << 1 | _BATCHED * greeting.batched
    bits |= _ERROR * (greeting.error is not None)
    return framed(bytes([bits]) + as_text("\n".join(greeting.forms) if greeting.error is None else greeting.error))


def results_frame(results: Sequence[Result]) -> bytes:
    """Returns the frame of a worker's results."""
    scored = [(identity, scores) for identity, scores, _ in results if scores is not None]
    errors = [(identity, as_text(error or "")) for identity, scores, error in results if scores is None]
    numbers = [number for _, scores in scored for number in scores]
    return framed(
        _COUNTS.pack(len(scored), len(errors))
        + struct.pack(f"<{len(scored)}q", *(identity for identity, _ in scored))
        + struct.pack(f"<{len(numbers)}d", *numbers)
        + struct.pack(f"<{len(errors)}q", *(identity for identity, _ in errors))
        + struct.pack(f"<{len(errors)}I", *(len(text) for _, text in errors))
        + b"".join(text for _, text in errors)
    )


def max_frame_bytes(num_items: int, num_rewards: int = 1) -> int:
    """Returns the length limit of a frame from a worker that has `num_items` items (0: of its greeting)."""
    return _COUNTS.size + max(1, num_items) * (8 + 8 * num_rewards + MAX_REASON)


def read_reward_greeting(body: bytes) -> Greeting:
    """Returns the argument of `reward_greeting_frame`. Raises `BrokenFrameError` for an invalid frame."""
    if not body or body[0] >= 2 * _BATCHED:
        raise BrokenFrameError(f"a frame of {len(body)} bytes that is not a greeting")
    bits, text = body[0], read_text(body[1:])
    if bits & _ERROR:
        return Greeting(text)
    return Greeting(None, bool(bits & _ASYNC), bool(bits & _BATCHED), bits >> 1 & 7, tuple(text.splitlines()))


def read_results(body: bytes, asked: AbstractSet[int], num_rewards: int = 1, *, may_lack: bool = False) -> list[Result]:
    """Returns the results of one or more of the items `asked`. Raises `BrokenFrameError` for an invalid frame.

    Each has the scores of `num_rewards` rewards; `may_lack`: NaN is one.
    """
    try:
        num_scored, num_errors = _COUNTS.unpack_from(body)
        if not 0 < num_scored + num_errors <= len(asked):
            raise BrokenFrameError(f"a frame of {num_scored + num_errors} results for {len(asked)} items")
        numbers = struct.Struct(f"<{num_scored}q{num_scored * num_rewards}d{num_errors}q{num_errors}I")
        found = numbers.unpack_from(body, _COUNTS.size)
    except struct.error as error:
        raise BrokenFrameError(f"a frame of {len(body)} bytes that does not hold results") from error
    ends = num_scored * (1 + num_rewards)
    scored, scores, failed = found[:num_scored], found[num_scored:ends], found[ends : ends + num_errors]
    identities = {*scored, *failed}
    if len(identities) != num_scored + num_errors or not identities <= asked:
        raise BrokenFrameError("a result of an item that the worker does not have")
    if not all(is_trainable(each) or (may_lack and each != each) for each in scores):
        raise BrokenFrameError("a reward that is not finite or too large")
    results: list[Result] = [
        (identity, scores[num_rewards * place : num_rewards * (place + 1)], None)
        for place, identity in enumerate(scored)
    ]
    at = _COUNTS.size + numbers.size
    for identity, size in zip(failed, found[ends + num_errors :], strict=True):
        results.append((identity, None, read_text(body[at : at + size])))
        at += size
    if at != len(body):
        raise BrokenFrameError(f"a frame of {len(body)} bytes whose texts have other lengths than it says")
    return results


def framed(body: bytes) -> bytes:
    """Returns a frame with this content."""
    return LENGTH.pack(len(body)) + body


def as_text(text: str) -> bytes:
    """Returns a text in UTF-8, cut to `MAX_REASON` bytes."""
    found = text.encode("utf-8", errors="replace")
    return found if len(found) <= MAX_REASON else found[: MAX_REASON - 3] + b"..."


def read_text(text: bytes) -> str:
    """Returns the text that `as_text` made. Raises `BrokenFrameError` if it is too long."""
    if len(text) > MAX_REASON:
        raise BrokenFrameError(f"an error text of {len(text)} bytes, more than the limit of {MAX_REASON}")
    return text.decode("utf-8", errors="replace")  # a text may have been cut inside a character
