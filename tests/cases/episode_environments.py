"""Environments that behave and misbehave, for worker processes. `prompt.row["does"]` says what an episode does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from typing import Any

from stretto.environments.protocol import Outcome, Policy
from stretto.errors import BudgetError, RoomError
from stretto.types import Prompt

HELD: list[Any] = []  # leaked


class Talks:
    """Asks `turns` times and observes the number of each turn; a turn earns its last token."""

    def __init__(self, tokenizer: Any, *, name: str = "") -> None:
        self.tokenizer = tokenizer

    async def episode(self, prompt: Prompt, policy: Policy) -> float | Outcome:
        does = prompt.row.get("does", "")
        context, rewards = list(prompt.tokens), list[float]()
        for number in range(prompt.row.get("turns", 2)):
            await self.act(does, number, policy)
            left = policy.left
            try:
                turn = await policy.generate(context)
            except RoomError:
                break
            rewards.append(float(turn.tokens[-1]) + left / 1024)
            context += [*turn.tokens.tolist(), number]
            if does == "report":
                policy.report(Outcome(tuple(rewards)))
        if does == "none":
            return None  # type: ignore[return-value]
        return Outcome(tuple(rewards))

    async def act(self, does: str, number: int, policy: Policy) -> None:
        if number != 1:
            return
        match does:
            case "raise":
                raise KeyError("no such world")
            case "exit":
                sys.exit(3)
            case "quit":
                os._exit(7)
            case "block":
                print("blocks")
                time.sleep(3600)
            case "wait" | "report":
                await asyncio.sleep(3600)
            case "stubborn":
                asyncio.get_running_loop().call_later(0.05, lambda: print("is stubborn", flush=True))
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)
                await asyncio.sleep(3600)
            case "fork":
                if os.fork():
                    os.wait()
            case "leak":
                HELD.append(bytearray(os.urandom(1) * (8 << 20)))
                await asyncio.sleep(0.05)
            case "hog":
                HELD.append(bytearray(os.urandom(1) * (256 << 20)))
                while True:  # the pool sees its memory in the middle of a step
                    await asyncio.sleep(0)
            case "flood":
                for line in range(20_000):
                    print(f"line {line} " + "x" * 80)
            case "garbage":
                for descriptor in range(3, 64):  # whichever is the pipe to the pool
                    with contextlib.suppress(OSError):
                        os.write(descriptor, b"\xff" * 64)
            case "two at once":
                await asyncio.gather(policy.generate([1]), policy.generate([1]), return_exceptions=True)
            case "give up":
                turn = asyncio.ensure_future(policy.generate([1, 2]))
                await asyncio.sleep(0)
                turn.cancel()
                await asyncio.gather(turn, return_exceptions=True)
            case "letters":
                await policy.generate(["a"])  # type: ignore[list-item]
            case "huge":
                await policy.generate(range(5_000_000))
            case "hanging tools":
                from stretto.chat.tools import make_tool

                def sleeps() -> str:
                    time.sleep(3600)
                    return ""

                tools = [make_tool(sleeps, seconds=0.01) for _ in range(32)]
                await asyncio.gather(*(each.call({}) for each in tools))
            case "large token":
                await policy.generate([1 << 40])
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "cancel itself":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)
            case "spend":
                policy.spend(2.0, "two calls")
                with contextlib.suppress(BudgetError):
                    policy.spend(2.0, "two more")
            case "spend meanwhile":
                asyncio.get_running_loop().call_soon(policy.spend, 1.0, "while it waits for its turn")
            case "overspend":
                policy.spend(10.0, "all of it")


class Branches:
    """Opens a lineage of its own beside the prompt's, and one that is not trained."""

    def __init__(self, tokenizer: Any) -> None:
        pass

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        first = await policy.generate(prompt.tokens)
        other = await policy.generate([9, 9], lineage=1, train=False)
        again = await policy.generate([*prompt.tokens, *first.tokens.tolist(), 5])
        last = await policy.generate([9, 9, *other.tokens.tolist(), 7], lineage=1, train=False)
        return float(sum(int(turn.tokens[-1]) for turn in (first, other, again, last)))


class Begins:
    """Is started and closed; `path` is a file that it writes to."""

    def __init__(self, tokenizer: Any, *, path: str, fails: bool = False) -> None:
        self.path, self.fails = path, fails

    def note(self, text: str) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    async def start(self) -> None:
        if self.fails:
            raise ConnectionError("no world today")
        self.note("start")

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        await policy.generate(prompt.tokens)
        self.note("episode")
        return 1.0

    async def close(self) -> None:
        self.note("close")


class Home:
    """Tries what a sandbox refuses, and earns 1 for each refusal."""

    def __init__(self, tokenizer: Any, *, path: str) -> None:
        self.path = path

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        import socket

        await policy.generate(prompt.tokens)
        refused = 0
        try:
            socket.socket().close()
        except OSError:
            refused += 1
        try:
            with open(self.path, "w", encoding="utf-8"):
                pass
        except OSError:
            refused += 1
        return float(refused)
