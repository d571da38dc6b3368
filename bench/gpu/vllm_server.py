"""A vLLM server in a process of its own, with LoRA adapters that are loaded from folders while it runs.

It listens on this host only and is always stopped at the end, with every process that it has started, also if this
process is killed. If it ends by itself, the main thread is interrupted: those who wait for its answers may do so for
long. What it prints goes to a file. Adapters and their evaluations need nothing but HTTP.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ENTRY = ("-m", "vllm.entrypoints.openai.api_server")
# Adapters by `/v1/load_lora_adapter`; `/pause`, `/resume` and `/server_info`, which TRL asks for.
# A whole test is one request; by default vLLM takes 1,024 prompts at once.
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_MAX_COMPLETION_PROMPTS": "100000",
}
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for
POLL_S = 0.5
STOP_S = 20.0  # until a server that was asked to end is killed
ANSWER_S = 1_800.0  # for one request, which may hold a whole test


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _end_with_parent() -> None:
    """Asks Linux to end this process when the one that has started it ends, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def served_rank(rank: int) -> int:
    """The smallest rank that vLLM has room for and this adapter fits into."""
    for room in LORA_RANKS:
        if room >= rank:
            return room
    raise ValueError(f"`--rank {rank}`: vLLM serves adapters of rank {LORA_RANKS[-1]} at most")


class Server:
    """A server that runs inside a `with` block."""

    def __init__(
        self,
        model: str,
        *,
        log: Path,
        timeout_s: float,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = (sys.executable, *ENTRY),
    ) -> None:
        """`timeout_s` is for its start; `arguments` and `environment` come on top of what is always set."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log, self._timeout_s = log, timeout_s
        own = ["--model", model, "--host", "127.0.0.1", "--port", str(self.port), "--disable-uvicorn-access-log"]
        self.command = [*program, *own, "--enable-lora", *arguments]
        self.environment = {**ENVIRONMENT, **(environment or {})}
        self.start_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._died = False

    def __enter__(self) -> Server:
        began = time.perf_counter()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,  # a group of its own, to stop its children with it
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        try:
            self._wait(began)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - began
        threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()
        return self

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Interrupts the main thread if the server ends before it is stopped."""
        process.wait()
        if self._process is process:
            self._died = True
            _thread.interrupt_main()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._died and kind is KeyboardInterrupt:
            raise RuntimeError(f"the vLLM server has ended by itself:\n{self.tail()}") from error

    def stop(self) -> None:
        """Ends the server and its children: asks, then kills."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what is left of its group
        process.wait()

    def _wait(self, began: float) -> None:
        """Returns once the server answers."""
        assert self._process is not None
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5.0) as answer:
                if answer.status == 200:
                    return
            if self._process.poll() is not None:
                raise RuntimeError(f"the vLLM server ended with {self._process.returncode}:\n{self.tail()}")
            if time.perf_counter() - began > self._timeout_s:
                raise TimeoutError(f"the vLLM server was not ready after {self._timeout_s:.0f} s:\n{self.tail()}")
            time.sleep(POLL_S)

    def tail(self, lines: int = 30) -> str:
        """The end of what it has printed, and where the rest is."""
        text = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        return "\n".join([*text, f"(all of it: {self.log})"])

    # -- requests

    def _ask(self, path: str, body: Mapping[str, Any] | None = None, method: str = "POST") -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code}, {error.read().decode(errors='replace')[:500]}") from error

    def adapters(self) -> list[str]:
        """The names of the adapters that are loaded."""
        listed = json.loads(self._ask("/v1/models", method="GET"))["data"]
        return [each["id"] for each in listed if each.get("parent")]

    def load(self, name: str, folder: Path) -> None:
        self._ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.absolute())})

    def unload(self, name: str) -> None:
        self._ask("/v1/unload_lora_adapter", {"lora_name": name})

    def clear(self) -> None:
        """Forgets all adapters and what is cached of them: another trainer uses their names again."""
        for name in self.adapters():
            self.unload(name)
        self._ask("/reset_prefix_cache")

    def answers(
        self, prompts: Sequence[Sequence[int]], name: str, temperature: float, max_tokens: int
    ) -> list[list[int]]:
        """One completion of each prompt under an adapter, all at once."""
        body = {"model": name, "prompt": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
        body |= {"temperature": temperature, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
        choices = json.loads(self._ask("/v1/completions", {**body, "return_token_ids": True}))["choices"]
        ordered = sorted(choices, key=lambda choice: int(choice["index"]))
        return [list(choice["token_ids"]) for choice in ordered]
