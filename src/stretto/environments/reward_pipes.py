"""The frames on the two pipes between the pool and a reward worker: a length, then that many bytes.

A worker trusts its pool, so a request is a pickle: rows may hold any type. The pool does not trust a worker: the
reward function and its imports run there and can write anything to the pipe. So a reply consists of numbers and text at
fixed places. Reading it executes nothing, and the pool checks a whole frame before it uses any part of it.

    greeting   the reply to the first request, which names the function: one byte (1 if the function is async), then an
               error text, empty if the function can be used
    results    the number of rewards and of errors; the ids of the rewards, the rewards; the ids of the errors, their
               lengths in bytes, their texts. Each id is of an item that the worker has, and occurs once.

Imports only the standard library: reward workers load this module.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from stretto.environments.reward_range import is_trainable

LENGTH = struct.Struct("<Q")
MAX_REASON = 8_000  # bytes of an error text
HALT = "\0halt\0"  # begins an error text that is not of its item: scoring cannot go on, and the run stops
_COUNTS = struct.Struct("<II")  # rewards, errors
_PER_ITEM = 16  # bytes of a result beside its text, at most

Item = tuple[int, str, str, Mapping[str, Any]]  # id, prompt, completion, row
Result = tuple[int, float | None, str | None]  # id, reward or error


class BrokenFrameError(Exception):
    """Bytes on the pipe from a worker that are not a valid frame."""


def request_frame(message: Any) -> bytes:
    """Returns the frame of a message to a worker. Passes on what pickling the message raises."""
    return framed(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def greeting_frame(error: str | None, asynchronous: bool) -> bytes:
    """Returns a worker's first frame: why the function cannot be used (or None), and if it is async."""
    return framed(bytes([asynchronous]) + (b"" if error is None else as_text(error)))


def results_frame(results: Sequence[Result]) -> bytes:
    """Returns the frame of a worker's results."""
    rewards = [(identity, reward) for identity, reward, _ in results if reward is not None]
    errors = [(identity, as_text(error or "")) for identity, reward, error in results if reward is None]
    return framed(
        _COUNTS.pack(len(rewards), len(errors))
        + struct.pack(f"<{len(rewards)}q", *(identity for identity, _ in rewards))
        + struct.pack(f"<{len(rewards)}d", *(reward for _, reward in rewards))
        + struct.pack(f"<{len(errors)}q", *(identity for identity, _ in errors))
        + struct.pack(f"<{len(errors)}I", *(len(text) for _, text in errors))
        + b"".join(text for _, text in errors)
    )


def max_frame_bytes(num_items: int) -> int:
    """Returns the length limit of a frame from a worker that has `num_items` items (0: of its greeting)."""
    return _COUNTS.size + max(1, num_items) * (_PER_ITEM + MAX_REASON)


def read_greeting(body: bytes) -> tuple[str | None, bool]:
    """Returns the arguments of `greeting_frame`. Raises `BrokenFrameError` for an invalid frame."""
    if body[:1] not in (b"\0", b"\1"):
        raise BrokenFrameError(f"a frame of {len(body)} bytes that is not a greeting")
    return read_text(body[1:]) or None, body[0] == 1


def read_results(body: bytes, asked: AbstractSet[int]) -> list[Result]:
    """Returns the results of one or more of the items `asked`. Raises `BrokenFrameError` for an invalid frame."""
    try:
        num_rewards, num_errors = _COUNTS.unpack_from(body)
        if not 0 < num_rewards + num_errors <= len(asked):
            raise BrokenFrameError(f"a frame of {num_rewards + num_errors} results for {len(asked)} items")
        numbers = struct.Struct(f"<{num_rewards}q{num_rewards}d{num_errors}q{num_errors}I")
        found = numbers.unpack_from(body, _COUNTS.size)
    except struct.error as error:
        raise BrokenFrameError(f"a frame of {len(body)} bytes that does not hold results") from error
    scored, rewards = found[:num_rewards], found[num_rewards : 2 * num_rewards]
    failed = found[2 * num_rewards : 2 * num_rewards + num_errors]
    identities = {*scored, *failed}
    if len(identities) != num_rewards + num_errors or not identities <= asked:
        raise BrokenFrameError("a result of an item that the worker does not have")
    if not all(map(is_trainable, rewards)):
        raise BrokenFrameError("a reward that is not finite or too large")
    results: list[Result] = [(identity, reward, None) for identity, reward in zip(scored, rewards, strict=True)]
    at = _COUNTS.size + numbers.size
    for identity, size in zip(failed, found[2 * num_rewards + num_errors :], strict=True):
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
