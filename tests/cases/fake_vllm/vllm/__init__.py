"""The parts of vLLM 0.32 that the engine uses, computed by transformers, one request at a time.

A folder on `PYTHONPATH` instead of the real package: whole runs, and their children, use it without a change. Tokens
and log-probabilities are those of the weights, so receipts hold. `make test-vllm` runs the same with the real one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

PREFIX, SUFFIX = "base_model.model.", ".weight"  # around the names of an adapter's tensors


class RequestOutputKind(Enum):
    """The outputs of a request that are returned."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    """Options of sampling."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE


@dataclass(frozen=True)
class LoRARequest:
    """An adapter."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class AsyncEngineArgs:
    """The options of an engine."""

    def __init__(self, **options: Any) -> None:
        self.options = options


def tokens_input(prompt_token_ids: list[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": prompt_token_ids}


class AsyncLLM:
    """An engine. Every request is computed from its first token again for each new one."""

    errored = False

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=getattr(torch, options["dtype"])
        ).eval()
        self._max_loras = options.get("max_loras", 0)
        self._masks = options.get("return_sampling_mask", False)
        self._turns = asyncio.Semaphore(options["max_num_seqs"])
        self._adapters: dict[int, dict[str, torch.Tensor]] = {}
        self._aborted: set[str] = set()
        self._version: str | None = None

    @classmethod
    def from_engine_args(cls, arguments: AsyncEngineArgs) -> AsyncLLM:
        return cls(arguments.options)

    # -- weights -------------------------------------------------------------------------------------------------------

    async def add_lora(self, request: LoRARequest) -> bool:
        assert len(self._adapters) < self._max_loras, "it would evict an adapter"
        folder = Path(request.lora_path)
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = {
            name.removeprefix(PREFIX).removesuffix(SUFFIX): each
            for name, each in load_file(folder / "adapter_model.safetensors").items()
        }
        scale, parameters, merged = config["lora_alpha"] / config["r"], dict(self._model.named_parameters()), {}
        for name in {each.rpartition(".")[0] for each in tensors}:
            low, high = tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]
            merged[f"{name}.weight"] = parameters[f"{name}.weight"].detach() + scale * high @ low
        self._adapters[request.lora_int_id] = merged
        return True

    async def remove_lora(self, number: int) -> bool:
        return self._adapters.pop(number, None) is not None

    async def collective_rpc(self, method: str, kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        if method == "reload_weights":
            assert kwargs is not None
            found = load_file(Path(kwargs["weights_path"]) / "model.safetensors")
            self._model.load_state_dict(found, strict=False)
        return [None]

    async def reset_prefix_cache(self) -> bool:
        return True

    async def update_weight_version(self, version: str) -> None:
        self._version = version

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        return [
            {
                f"dp0:pp0:pcp0:tp0:{name}": hashlib.sha256(each.detach().contiguous().numpy().tobytes()).hexdigest()
                for name, each in self._model.named_parameters()
            }
        ]

    # -- requests ------------------------------------------------------------------------------------------------------

    def _logits(self, tokens: list[int], adapter: LoRARequest | None) -> torch.Tensor:
        changed = {} if adapter is None else self._adapters[adapter.lora_int_id]
        arguments = {"input_ids": torch.tensor([tokens]), "use_cache": False}
        with torch.no_grad():
            made = torch.func.functional_call(self._model, changed, kwargs=arguments, tie_weights=True)
        return made.logits[0].float()

    async def generate(
        self,
        prompt: Mapping[str, list[int]],
        how: SamplingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Any]:
        if self._masks and (how.temperature <= 0 or how.top_k <= 0):
            raise ValueError("sampling distribution replay requires temperature > 0 and top_k > 0")
        tokens, asked = list(prompt["prompt_token_ids"]), None
        async with self._turns:
            if how.prompt_logprobs is not None:
                pairs = zip(self._logits(tokens[:-1], lora_request).log_softmax(-1), tokens[1:], strict=True)
                found = [{token: SimpleNamespace(logprob=row[token].item())} for row, token in pairs]
                asked = [None, *found]
            generator = torch.Generator().manual_seed((how.seed or 0) % (1 << 63))
            for place in range(how.max_tokens):
                await asyncio.sleep(0)
                if request_id in self._aborted:
                    yield self._output([], [], None, "abort", place, asked)
                    return
                logprobs = _processed(self._logits(tokens, lora_request)[-1], how)
                drawn = (
                    torch.multinomial(logprobs.exp(), 1, generator=generator) if how.temperature else logprobs.argmax()
                )
                token = int(drawn)
                tokens.append(token)
                stops, last = token in how.stop_token_ids, place + 1 == how.max_tokens
                finish = "stop" if stops else "length" if last else None
                mask = torch.isfinite(logprobs).nonzero()[:, 0].tolist() if self._masks else None
                yield self._output([token], [logprobs[token].item()], mask, finish, place + 1, asked)
                if finish is not None:
                    return

    def _output(
        self,
        tokens: list[int],
        logprobs: list[float],
        mask: list[int] | None,
        finish: str | None,
        made: int,
        asked: Any,
    ) -> Any:
        spans = [SimpleNamespace(version=self._version, start=0, end=made)]
        completion = SimpleNamespace(
            token_ids=tokens,
            logprobs=[{token: SimpleNamespace(logprob=each)} for token, each in zip(tokens, logprobs, strict=True)],
            finish_reason=finish,
            weight_versions=spans if finish is not None and self._version is not None else None,
            sampling_mask=None if mask is None else SimpleNamespace(token_ids=[mask]),
        )
        return SimpleNamespace(outputs=[completion], num_cached_tokens=0, prompt_logprobs=asked)

    async def abort(self, names: list[str]) -> None:
        self._aborted.update(names)


def _processed(logits: torch.Tensor, how: SamplingParams) -> torch.Tensor:
    """The log-probabilities that a token is drawn from: after temperature, `min_p`, `top_k` and `top_p`."""
    logits = logits / how.temperature if how.temperature else logits
    if how.min_p:
        least = logits.max() + torch.log(torch.tensor(how.min_p))
        logits = logits.masked_fill(logits < least, -torch.inf)
    if how.top_k:
        least = logits.topk(min(how.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if how.top_p < 1:
        chances, order = logits.softmax(-1).sort(descending=True)
        beyond = order[(chances.cumsum(-1) - chances) > how.top_p]
        logits[beyond] = -torch.inf
    return logits.log_softmax(-1)


def _module(name: str, **names: Any) -> None:
    made = sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    made.__dict__.update(names)


for _name in ("engine", "v1", "v1.engine", "lora"):
    _module(_name)
_module("engine.arg_utils", AsyncEngineArgs=AsyncEngineArgs)
_module("v1.engine.async_llm", AsyncLLM=AsyncLLM)
_module("lora.request", LoRARequest=LoRARequest)
_module("inputs", tokens_input=tokens_input)
_module("sampling_params", RequestOutputKind=RequestOutputKind)
