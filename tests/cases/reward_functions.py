"""Rewards for the tests of the pool: each misbehaves in its own way on the completions that ask for it."""

import asyncio
import fcntl
import os
import pickle
import struct
import sys
import time
from pathlib import Path

NUMBER = 3


def length(prompt, completion, **row):
    return len(completion) + row.get("bonus", 0)


def parsed(prompt, completion, **row):
    return eval(completion)


def odd(prompt, completion, *, when, tags, raw, nested, **row):
    """Rows hold whatever a Parquet file, or a data set of Python's, does."""
    return when.year + sum(tags) + len(raw) + len(nested[1])


def only_answer(prompt, completion, answer):
    return completion == answer


def only_text(text):
    return 1.0


def only_completion(completion):
    return len(completion)


def as_asked(prompt, completion, **row):
    match completion:
        case "raise":
            raise KeyError("no such answer")
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(7)
        case "hang":
            time.sleep(60)
        case "nan":
            return float("nan")
        case "inf":
            return float("inf")
        case "none":
            return None
        case "string":
            return "1.0"
        case "true":
            return True
        case "imports":
            return float("torch" in sys.modules or "transformers" in sys.modules or "numpy" in sys.modules)
        case "pid":
            return os.getpid()
        case "print":
            print("noise on standard output")
    return 1.0


def slow(prompt, completion, **row):
    time.sleep(0.02)
    return os.getpid()


async def later(prompt, completion, **row):
    match completion:
        case "raise":
            raise ValueError("no")
        case "hang":
            await asyncio.sleep(60)
        case "block":
            time.sleep(60)
        case "stubborn":
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    continue
        case "timeout":
            raise TimeoutError("their own")
    await asyncio.sleep(0.2)
    return len(completion)


def forked(prompt, completion, **row):
    """A copy of the process that does as asked, beside a reward that is fine."""
    child = os.fork()
    if child == 0:
        match completion:
            case "returns":
                return 5.0
            case "raises":
                raise ValueError("of the copy")
            case "exits":
                sys.exit(3)
            case "stays":
                os.setsid()
                time.sleep(60)
            case "prints":
                print("noise of the copy")
                return None
    if completion == "stays":
        return child
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def forked_later(prompt, completion, **row):
    await asyncio.sleep(0.01)
    child = os.fork()
    if child == 0 and completion == "awaits":
        await asyncio.sleep(0.01)
    if child == 0 and completion == "raises":
        raise ValueError("of the copy")
    if child == 0:
        return 5.0
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _pipe():
    """The pipe of the results, for a reward that means no good."""
    for number in range(3, 64):
        try:
            writes = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        except OSError:
            continue
        if writes and os.readlink(f"/proc/self/fd/{number}").startswith("pipe:"):
            return number
    raise RuntimeError("no pipe")


class Touch:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def forger(prompt, completion, path=None, **row):
    """Writes what is asked for to the pipe of the results, and then behaves."""
    bodies = {
        "pickle": lambda: pickle.dumps(Touch(path)),
        "empty": lambda: b"",
        "nothing": lambda: struct.pack("<II", 0, 0),
        "many": lambda: struct.pack("<II", 2**32 - 1, 2**32 - 1),
        "another": lambda: struct.pack("<IIqd", 1, 0, 10**6, 1.0),
        "infinite": lambda: struct.pack("<IIqd", 1, 0, 2, float("inf")),
        "no number": lambda: struct.pack("<IIqd", 1, 0, 2, float("nan")),
        "too much": lambda: struct.pack("<IIqd", 1, 0, 2, 1e10),
        "twice": lambda: struct.pack("<II2q2d", 2, 0, 2, 2, 1.0, 1.0),
        "both": lambda: struct.pack("<IIqdqI", 1, 1, 2, 1.0, 2, 0),
        "short text": lambda: struct.pack("<IIqI", 0, 1, 2, 5) + b"none",
        "long text": lambda: struct.pack("<IIqI", 0, 1, 2, 9_000) + bytes(9_000),
    }
    if completion in bodies:
        body = bodies[completion]()
        os.write(_pipe(), struct.pack("<Q", len(body)) + body)
    if completion == "long":
        os.write(_pipe(), struct.pack("<Q", 1 << 60))
    if completion == "bytes":
        os.write(_pipe(), b"noise on the pipe of the results")
    time.sleep(0 if completion == "ok" else 0.05)  # until the pool has read it
    return 1.0


async def forger_later(prompt, completion, **row):
    await asyncio.sleep(0.01)
    return forger(prompt, completion, **row)


def large(prompt, completion, **row):
    return eval(completion)


async def large_later(prompt, completion, **row):
    return eval(completion)


def verbose(prompt, completion, **row):
    raise ValueError(completion * 100_000)


def variable(prompt, completion, **row):
    """Whether a variable of the environment has the value that is asked for."""
    name, _, value = completion.partition("=")
    return os.environ.get(name) == value


def num_variables(prompt, completion, **row):
    raise ValueError(" ".join(sorted(os.environ)))
