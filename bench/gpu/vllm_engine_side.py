"""Generation by the engine `vllm`: vLLM in a child process, behind the same protocol as the native engine.

Its throughput beside that of vLLM by itself (`vllm_side.py`) says what the process boundary, the messages with
tokens and the seeds of requests cost. Versions are loaded with receipts, as in a run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.floor import traffic
from bench.gpu.shapes import RANK, adapter, base_weights, make_model
from bench.gpu.sides import SLOTS, Ask, Outcome, expect
from stretto.engines.threaded import Failed
from stretto.engines.vllm.engine import VllmEngine
from stretto.engines.vllm.frames import ChildOptions
from stretto.engines.vllm.process import ChildProcess
from stretto.models.lora import adapted_modules
from stretto.setup.vllm_engines import STREAM_TOKENS
from stretto.training.probes import probe_tokens
from stretto.types import Probe, Request, Sampling, Weights

BLOCK = 16  # tokens of one page of vLLM's cache
PREFILL_TOKENS = 8_192
SHARE = 0.6  # of the device, that vLLM may take
MAX_ROWS = 512


def probed(model: Any, weights: Weights) -> Weights:
    """Returns the version with the probe that a receipt needs, scored by transformers on merged weights."""
    parameters, tokens = dict(model.named_parameters()), probe_tokens(int(model.config.vocab_size))
    merged: dict[str, torch.Tensor] = {}
    if weights.kind == "lora":
        for name in {each.rpartition(".")[0] for each in weights.tensors}:
            low = weights.tensors[f"{name}.lora_B"].float() @ weights.tensors[f"{name}.lora_A"].float()
            base = parameters[f"{name}.weight"]
            merged[f"{name}.weight"] = (base.float() + weights.scale * low).to(base.dtype)
    given = {"input_ids": torch.tensor([tokens], device=model.device), "use_cache": False}
    with torch.no_grad():
        logits = torch.func.functional_call(model, merged, kwargs=given, tie_weights=True).logits[0].float()
    rows = logits.log_softmax(-1)[:-1]
    logprobs = rows.gather(1, torch.tensor(tokens[1:], device=rows.device)[:, None])[:, 0]
    return replace(weights, probe=Probe(tokens, logprobs.cpu().numpy().astype(np.float32)))


class VllmEngineSide:
    """The engine `vllm` over one model with random weights, with `SLOTS` adapters loaded, or its base weights.

    `folder` holds the model. One engine serves all cells.
    """

    name = "vllm-engine"

    def __init__(self, size: str, *, lora: bool, max_context: int, folder: Path) -> None:
        self.size, self.lora, self.traffic = size, lora, traffic(size)
        model = make_model(size, "cuda")
        model.save_pretrained(folder / "model")
        targets = {name.rpartition(".")[2] for name in adapted_modules(model)}
        versions = [probed(model, (adapter if lora else base_weights)(model, v)) for v in range(SLOTS if lora else 1)]
        versions = [replace(each, tensors={n: t.cpu() for n, t in each.tensors.items()}) for each in versions]
        del model
        torch.cuda.empty_cache()
        self._kv_tokens = MAX_ROWS * max_context
        options = ChildOptions(
            model=str(folder / "model"),
            kind="lora" if lora else "full",
            dtype="bfloat16",
            device="cuda",
            slots=len(versions),
            lora_rank=RANK if lora else 0,
            rows=MAX_ROWS,
            max_context=max_context,
            kv_bytes=self._kv_tokens * self.traffic.kv_bytes_per_token,
            kv_block=BLOCK,
            prefill_tokens=PREFILL_TOKENS,
            file_bytes=sum(tensor.nbytes for each in versions for tensor in each.tensors.values()),
            lora_targets=tuple(sorted(targets)) if lora else (),
            device_share=SHARE,
            stream_tokens=STREAM_TOKENS["cuda"],
        )
        began = time.perf_counter()
        self.engine = VllmEngine(ChildProcess(options), options, kv_tokens=self._kv_tokens)
        print(f"the engine started in {time.perf_counter() - began:.1f} s", flush=True)
        for version in versions:
            began = time.perf_counter()
            receipt = self.engine.load(version)
            print(f"version {version.version} loaded in {time.perf_counter() - began:.2f} s: {receipt}", flush=True)
        self._next_id = 0

    def room(self) -> int:
        return self._kv_tokens

    def prepare(self, rows: int, kv_tokens: int, max_context: int) -> None:
        """Nothing: one engine does for all of it."""
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows are asked of an engine with {MAX_ROWS}")

    def generate(self, asks: Sequence[Ask]) -> Outcome:
        start, made = self._next_id, 0
        self._next_id += len(asks)
        began = time.perf_counter()
        for id, ask in enumerate(asks, start):
            self.engine.add(Request(id, ask.version, ask.prompt, id, Sampling(ask.tokens)))
        while self.engine.has_work:
            for done in self.engine.step():
                if isinstance(done, Failed):
                    raise RuntimeError(f"request {done.id} failed: {done.error}")
                made += len(done.tokens)
        seconds = time.perf_counter() - began
        expect(made, asks)
        return Outcome(seconds, made, {"steps": self.engine.report().steps})

    def filled_steps(self, asks: Sequence[Ask], steps: int) -> Outcome:
        raise NotImplementedError("filled contexts are measured with vLLM by itself")

    def close(self) -> None:
        self.engine.close()
