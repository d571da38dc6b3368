"""A child process without vLLM: `python -m fake_vllm_child DESCRIPTOR FOLDER`.

Tokens and log-probabilities come from a hash of the files that it loaded, of the prompt and of the seed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from vllm_faults import Faulty

from stretto.engines.vllm import frames
from stretto.engines.vllm.child_server import run_child
from stretto.engines.vllm.weight_folders import FULL_FILE
from stretto.models.lora import PREFIX, SUFFIX, WEIGHTS_FILE

STEP_S = 0.001
VOCABULARY, MEDIAN = 40, 60.0
DIES_OF = 39  # a prompt of this token alone kills the child
FAILS_OF = 38  # and one of this token fails
ENDS_OF = 37  # and one of this token ends after a token, without a reason


def digest_of(tensors: Mapping[str, Any]) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        state.update(tensors[name].detach().contiguous().numpy().tobytes())
    return state.digest()


def answer(digest: bytes, tokens: Sequence[int]) -> list[float]:
    """The log-probability of each token after the first."""
    return [-3.0 * _uniform(digest, b"probe", place, token) for place, token in enumerate(tokens)][1:]


def _uniform(*parts: Any) -> float:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part if isinstance(part, bytes) else repr(part).encode())
    return (int.from_bytes(state.digest(), "little") + 0.5) / 2.0**64


class FakeBackend:
    """The `Backend` of `child_server.py`, with rows and a queue as an engine has them."""

    def __init__(self) -> None:
        self._adapters: dict[int, bytes | None] = {}
        self._base = b"base"
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._running = 0
        self._aborted: set[int] = set()
        self._rows = 1

    async def start(self, options: frames.ChildOptions) -> frames.Ready:
        if options.model == "missing":
            raise RuntimeError("there is no such model")
        if options.model == "blocks":
            subprocess.Popen(["sleep", "600"])
            time.sleep(600)  # as vLLM blocks the loop while it starts, with a process of its own
        self._rows = options.rows
        return frames.Ready("vllm 0.0.fake")

    def failure(self) -> str:
        return ""

    async def load_adapter(self, number: int, folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        self._adapters[number] = digest_of({n.removeprefix(PREFIX).removesuffix(SUFFIX): t for n, t in tensors.items()})

    async def remove_adapter(self, number: int) -> None:
        del self._adapters[number]

    async def reload(self, number: int, folder: Path) -> None:
        fresh = digest_of(load_file(folder / FULL_FILE))
        stale, self._base = self._base, b"half " + fresh
        await self.repack_head()
        if self._base.startswith(b"half "):
            self._base += stale

    async def repack_head(self) -> None:
        self._base = self._base.removeprefix(b"half ")

    def _digest(self, number: int) -> bytes:
        return self._adapters.get(number) or self._base

    async def score(self, tokens: Sequence[int], number: int) -> list[float]:
        return answer(self._digest(number), tokens)

    async def held(self) -> str | None:
        return self._base.hex()

    async def generate(self, work: frames.Generate) -> AsyncIterator[frames.Piece]:
        if work.prompt == (DIES_OF,):
            os.kill(os.getpid(), signal.SIGKILL)
        if work.prompt == (FAILS_OF,):
            raise ValueError("this prompt fails")
        await self._admitted(work)
        try:
            digest, normal = self._digest(work.number), np.random.default_rng(work.seed).normal()
            total = min(work.max_tokens, max(1, round(MEDIAN * float(np.exp(normal)))))
            for place in range(total):
                if work.key in self._aborted or (work.prompt == (ENDS_OF,) and place):
                    return
                await asyncio.sleep(STEP_S)
                token = int(VOCABULARY * _uniform(digest, work.prompt, work.seed, place))
                last = place + 1 == total
                if last and total < work.max_tokens and work.stop_tokens:
                    token = work.stop_tokens[0]
                logprob = -3.0 * _uniform(digest, work.prompt, work.seed, place, "logprob")
                finish: Any = None if not last else "stop" if total < work.max_tokens else "length"
                support = ((token, (token + 1) % VOCABULARY),) if work.supports else None
                yield frames.Piece(work.key, (token,), (logprob,), finish, supports=support)
        finally:
            self._running -= 1
            self._admit()

    async def _admitted(self, work: frames.Generate) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((work.priority, work.key, turn))
        asyncio.get_running_loop().call_soon(self._admit)
        await turn

    def _admit(self) -> None:
        while self._queue and self._running < self._rows:
            first = min(self._queue, key=lambda each: each[:2])
            self._queue.remove(first)
            self._running += 1
            first[2].set_result(None)

    async def abort(self, keys: Sequence[int]) -> None:
        self._aborted.update(keys)
        for waiting in [each for each in self._queue if each[1] in self._aborted]:
            self._queue.remove(waiting)
            self._running += 1  # until it notices
            waiting[2].set_result(None)


class FaultyBackend(Faulty, FakeBackend):
    """The fake with faults on demand."""


if __name__ == "__main__":
    run_child(FaultyBackend(), sys.argv)
