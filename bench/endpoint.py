"""The endpoint under load: the real client of OpenAI, many sessions at once, a policy that only waits.

    python bench/endpoint.py [--sessions 256] [--rate 100] [--seconds 30] [--busy 0] [--opened 10000] [--out FILE]

Clients run in a process of their own, which needs more of a core than the server does. Each session makes one call
after another, with a chat that grows, so that all of them together make `--rate` calls a second. `--busy` more
processes burn a core each meanwhile, at a lower priority (`nice 10`).

Prints the time of a call in the server outside of the policy, and what is left after many sessions. Exits with 1 if a
call failed, if its 99th percentile is over 20 ms, or if anything is left.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import json
import multiprocessing
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from stretto.models.tiny import tiny_tokenizer
from stretto.serve.conversations import chat_conversations
from stretto.serve.http import Endpoint, Model
from stretto.serve.sessions import Call, RequestedSampling, Sessions
from stretto.types import Completion

POLICY_S = 0.2  # of one call
ANSWER = "a reply of sixty-four characters, as long as a short tool call is"
TURNS = 8  # of a chat, before it begins again
LIMIT_MS = 20.0


class PacedPolicy:
    """Answers every call after `POLICY_S`, with the same words."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokens = np.array([*tokenizer.encode(ANSWER), tokenizer.eos_token_id], np.int32)
        self._logprobs = np.full(len(self._tokens), -0.5, np.float32)

    async def generate(self, tokens: tuple[int, ...], lineage: int, train: bool, _: RequestedSampling) -> Completion:
        await asyncio.sleep(POLICY_S)
        return Completion(0, 0, self._tokens, self._logprobs, "stop", "")


# -- clients -----------------------------------------------------------------------------------------------------------


def run_clients(url: str, keys: list[str], rate: float, seconds: float, results: Any) -> None:
    """Calls from a process of its own. Puts the seconds of each call, and the errors, into `results`."""
    results.put(asyncio.run(_clients(url, keys, rate, seconds)))


async def _clients(url: str, keys: list[str], rate: float, seconds: float) -> tuple[list[float], list[str]]:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    took: list[float] = []
    errors: list[str] = []
    every_s = len(keys) / rate  # between two calls of one session
    shared = DefaultAsyncHttpxClient(limits=_limits(len(keys)))
    end = time.monotonic() + seconds

    async def session(number: int, key: str) -> None:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=shared, max_retries=0)
        await asyncio.sleep(every_s * number / len(keys))
        messages: list[Any] = []
        while (began := time.monotonic()) < end:
            if len(messages) >= 2 * TURNS:
                messages = []
            messages.append({"role": "user", "content": f"task {number}: what next?"})
            try:
                made = await client.chat.completions.create(
                    model="any", messages=messages, logprobs=True, extra_body={"return_token_ids": True}
                )
                messages.append({"role": "assistant", "content": made.choices[0].message.content})
                took.append(time.monotonic() - began)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
                return
            await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))

    await asyncio.gather(*map(session, range(len(keys)), keys))
    await shared.aclose()
    return took, errors


def _limits(num_sessions: int) -> Any:
    from openai import DefaultHttpxClient

    library = sys.modules[DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]]  # the HTTP library of the client
    return library.Limits(max_connections=num_sessions, max_keepalive_connections=num_sessions)


def burn() -> None:
    os.nice(10)
    while True:
        sum(range(10_000))


# -- measurements ------------------------------------------------------------------------------------------------------


async def load(num_sessions: int, rate: float, seconds: float, busy: int) -> dict[str, float]:
    """Returns figures of a server under load, times in milliseconds."""
    tokenizer = tiny_tokenizer()
    policy, conversations = PacedPolicy(tokenizer), chat_conversations(tokenizer)
    sessions = Sessions(vocabulary=len(tokenizer))
    in_server: list[float] = []
    endpoint = Endpoint(sessions, Model("policy", lambda token: str(tokenizer.decode([token]))))
    endpoint.on_call = in_server.append
    await endpoint.start()
    conversations(None).request([{"role": "user", "content": "compiles the template"}])
    opened = [sessions.open(policy.generate, conversations(None), max_tokens=8_192) for _ in range(num_sessions)]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    keys = [session.key for session in opened]
    clients = context.Process(target=run_clients, args=(endpoint.url, keys, rate, seconds, results))
    burners = [context.Process(target=burn, daemon=True) for _ in range(busy)]
    for process in (*burners, clients):
        process.start()
    gc.collect()
    gc.freeze()  # as a run does: collections leave the libraries out
    try:
        own = time.process_time()
        took, errors = await asyncio.to_thread(results.get)
        own = time.process_time() - own
    finally:
        for burner in burners:
            burner.kill()
        clients.join()
        await endpoint.close()
        gc.unfreeze()
    for error in errors[:3]:
        print(error, file=sys.stderr)
    server = 1e3 * np.sort(in_server)
    return {
        "sessions": num_sessions,
        "calls": len(took),
        "errors": len(errors),
        "calls_per_s": len(took) / seconds,
        "server_median_ms": float(np.median(server)),
        "server_p99_ms": float(np.quantile(server, 0.99)),
        "server_max_ms": float(server[-1]),
        "client_median_ms": 1e3 * float(np.median(took)) - 1e3 * POLICY_S,
        "processor_ms_per_call": 1e3 * own / len(took),
    }


async def open_and_close(count: int) -> dict[str, float]:
    """Returns what is left after `count` sessions, each with a call."""
    tokenizer = tiny_tokenizer()
    policy, conversations = PacedPolicy(tokenizer), chat_conversations(tokenizer)
    sessions = Sessions(vocabulary=len(tokenizer))
    call = Call([{"role": "user", "content": "hello"}], identity=b"one")

    async def one() -> None:
        session = sessions.open(policy.generate, conversations(None), max_tokens=8_192, deadline_s=3_600)
        await sessions.call(session.key, call)
        await sessions.close(session)

    async def many(number: int) -> None:
        for _ in range(number // 500):
            await asyncio.gather(*(one() for _ in range(500)))

    await many(1_000)  # caches of the tokenizer and of the interpreter are filled
    gc.collect()
    before = len(gc.get_objects())
    began = time.monotonic()
    await many(count)
    took = time.monotonic() - began
    await asyncio.sleep(0)
    gc.collect()
    return {
        "opened": count,
        "sessions_left": sessions.num_open,
        "tasks_left": len(asyncio.all_tasks()) - 1,
        "objects_left": len(gc.get_objects()) - before,
        "us_per_session": 1e6 * max(0.0, took - POLICY_S * count / 500) / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The endpoint under load.")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--rate", type=float, default=100.0, help="calls a second, of all sessions together")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--busy", type=int, default=0, help="processes that burn a core each")
    parser.add_argument("--opened", type=int, default=10_000, help="sessions opened and closed")
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args()
    before = os.getloadavg()
    figures = asyncio.run(load(options.sessions, options.rate, options.seconds, options.busy))
    figures |= asyncio.run(open_and_close(options.opened))
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "load_before": before,
        "load_after": os.getloadavg(),
    }
    rounded = {name: round(value, 3) for name, value in figures.items()}
    made = {
        "command": " ".join(["python bench/endpoint.py", *sys.argv[1:]]),
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("aiohttp", "openai", "numpy")},
        "rate": options.rate,
        "busy": options.busy,
        "machine": machine,
    }
    text = json.dumps({**made, **rounded}, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    left = figures["sessions_left"] or figures["tasks_left"] or figures["objects_left"] > options.opened / 100
    sys.exit(int(bool(figures["errors"] or left or figures["server_p99_ms"] > LIMIT_MS)))


if __name__ == "__main__":
    main()
