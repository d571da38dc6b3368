"""Children of vLLM engines that one engine after another uses, and weights with probes for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_cases import RANK, SHAPE, VOCABULARY, weights_of
from fake_vllm_child import answer, digest_of
from vllm_faults import VARIABLE

from stretto.engines.threaded import ThreadedEngine
from stretto.engines.vllm import frames
from stretto.engines.vllm.engine import VllmEngine
from stretto.engines.vllm.process import ChildProcess
from stretto.errors import EngineError
from stretto.types import Probe, Weights

KV_TOKENS, BLOCK = 2048, 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROBE = tuple(torch.randint(0, VOCABULARY, (48,), generator=torch.Generator().manual_seed(3)).tolist())


def options_of(model: str, **changes: Any) -> frames.ChildOptions:
    """An engine of two slots, eight rows and 2,048 tokens of KV, as the contract has it."""
    per_token = 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 4
    options = frames.ChildOptions(
        model=model,
        kind="lora",
        dtype="float32",
        device="cpu",
        slots=2,
        lora_rank=RANK,
        rows=8,
        max_context=512,
        kv_bytes=per_token * (KV_TOKENS + BLOCK),
        kv_block=BLOCK,
        prefill_tokens=2048,
        file_bytes=1 << 20,
        lora_targets=TARGETS,
        threads=1,
    )
    return replace(options, **changes)


def blocked_child(folder: Path) -> tuple[subprocess.Popen[bytes], Connection]:
    """A child that starts for ever, as vLLM does while it loads a model, with a process of its own."""
    ours, theirs = socket.socketpair()
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "fake_vllm_child", str(theirs.fileno()), str(folder)]
    child = subprocess.Popen(command, pass_fds=(theirs.fileno(),), start_new_session=True, env=environment)
    theirs.close()
    pipe = Connection(ours.detach())
    pipe.send(frames.Start(1, options_of("blocks")))
    return child, pipe


class Children:
    """Children by their options. One that an engine is done with serves the next."""

    def __init__(self, module: str, folder: Path) -> None:
        self.module = module
        self.fault_file = folder / "fault"
        self.fault_file.write_text("")
        self._free: dict[frames.ChildOptions, list[ChildProcess]] = {}

    def core(self, options: frames.ChildOptions, decode: Callable[[Sequence[int]], str] | None = None) -> VllmEngine:
        free = self._free.setdefault(options, [])
        os.environ[VARIABLE] = str(self.fault_file)  # a child that starts now reads it
        process = free.pop() if free else ChildProcess(options, module=self.module)
        return _Borrowing(process, options, free, decode)

    def engine(self, options: frames.ChildOptions, **more: Any) -> ThreadedEngine:
        return ThreadedEngine(lambda: self.core(options, **more), name="vllm")

    @contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """The loads in here have this fault."""
        self.fault_file.write_text(name)
        try:
            yield
        finally:
            self.fault_file.write_text("")

    def close(self) -> None:
        for process in [process for free in self._free.values() for process in free]:
            process.close()


class _Borrowing(VllmEngine):
    """An engine that leaves its child without requests and versions to the next engine, if the child still works."""

    def __init__(
        self,
        process: ChildProcess,
        options: frames.ChildOptions,
        free: list[ChildProcess],
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        super().__init__(process, options, kv_tokens=KV_TOKENS, decode=decode)
        self._free = free

    def close(self) -> None:
        try:
            self.abort(list(self._trajectories))
            for version in list(self._versions):
                self.unload(version)
        except EngineError:
            super().close()
        else:
            self._free.append(self._process)


def probed(weights: Weights, model: Any, *, fake: bool) -> Weights:
    """Weights with the probe that a trainer would give them: by the model, or by what the fake child makes of them."""
    logprobs = answer(digest_of(weights.tensors), PROBE) if fake else logprobs_of(model, weights, PROBE)
    return replace(weights, probe=Probe(PROBE, np.array(logprobs, dtype=np.float32)))


def probed_weights(kind: str, model: Any, version: int, *, fake: bool) -> Weights:
    return probed(weights_of(kind, model, version), model, fake=fake)


def logprobs_of(model: Any, weights: Weights, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
    """The log-probability of each token after the first, by transformers on merged weights."""
    parameters = dict(model.named_parameters())
    changed: dict[str, torch.Tensor] = {}
    if weights.kind == "full":
        changed = dict(weights.tensors)
    else:
        for name in {each.rpartition(".")[0] for each in weights.tensors}:
            low, high = weights.tensors[f"{name}.lora_A"], weights.tensors[f"{name}.lora_B"]
            changed[f"{name}.weight"] = parameters[f"{name}.weight"].detach() + weights.scale * high @ low
    with torch.no_grad():
        logits = torch.func.functional_call(
            model, changed, kwargs={"input_ids": torch.tensor([list(tokens)]), "use_cache": False}, tie_weights=True
        ).logits[0]
    logprobs = (logits.float() / temperature).log_softmax(-1)[:-1]
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
