"""Rewards for the tests of the pool: each misbehaves in its own way on the completions that ask for it."""

import asyncio
import os
import sys
import time

NUMBER = 3


def length(prompt, completion, **row):
    return len(completion) + row.get("bonus", 0)


def parsed(prompt, completion, **row):
    return eval(completion)


def only_answer(prompt, completion, answer):
    return completion == answer


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
