"""Serves a trained policy over HTTP (`stretto serve`): loads it into one engine, and trains nothing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from stretto.engines.native.engine import NativeEngine
from stretto.engines.protocol import Engine
from stretto.engines.threaded import ThreadedEngine
from stretto.errors import RequestError, RoomError, RunError
from stretto.models.adapter_config import CONFIG_FILE, read_adapter_config
from stretto.models.adapters import read_adapter
from stretto.models.checksums import checksum
from stretto.models.loading import has_tokenizer, load_config, load_model, load_tokenizer
from stretto.models.stop_tokens import stop_tokens
from stretto.run.interrupts import stopped_by_interrupts
from stretto.serve.conversations import MakeConversations, chat_conversations
from stretto.serve.http import Endpoint, Model, refuse_missing_library
from stretto.serve.open_access import OpenAccess
from stretto.serve.sessions import RequestedSampling
from stretto.setup.device import choose_device, choose_dtype
from stretto.setup.factories import decoder_of
from stretto.setup.memory_sizes import context_length, kv_bytes_per_token
from stretto.setup.threads import available_cores
from stretto.types import Completion, Request, Sampling, Weights

KV_SHARE = 0.8  # of the memory that is free on a GPU once the model is there
KV_GIB = 2  # in host memory


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The arguments of `stretto serve`."""

    host: str = "127.0.0.1"
    port: int = 8_000
    key: str | None = None  # None: a random one
    device: str = "auto"
    rows: int = 32  # calls that are generated at once; others wait
    temperature: float = 1.0  # of a call that names none


@dataclass(frozen=True, slots=True)
class PolicyFolder:
    """A folder that holds a whole model, or an adapter and the name of its base."""

    path: Path
    base: str  # where the model is loaded from
    rank: int | None = None  # of the adapter; None: there is none
    scale: float = 1.0

    @classmethod
    def find(cls, folder: Path) -> PolicyFolder:
        """Finds the policy in a run folder or a policy folder. Raises `RunError` if there is none."""
        path = folder / "policy" if (folder / "policy").is_dir() else folder
        if (path / CONFIG_FILE).is_file():
            config = read_adapter_config(path)
            if config.base_path is None:
                raise RunError(f"the adapter in `{path}` does not say which base it is of")
            return cls(path, config.base_path, config.rank, config.scale)
        if (path / "config.json").is_file():
            return cls(path, str(path))
        raise RunError(
            f"`{folder}` holds no policy: name a run folder that is finished, its folder `policy`, or a model folder"
        )

    @property
    def tokenizer(self) -> str:
        """The folder or hub name of its tokenizer, which has the chat template of the training."""
        return str(self.path) if has_tokenizer(self.path) else self.base

    def weights(self, model: Any) -> Weights:
        """Reads the weights that the engine is given: of the adapter, or all of the model's own."""
        if self.rank is None:
            tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
            return Weights(0, "full", tensors, checksum(tensors))
        dtype = next(model.parameters()).dtype
        tensors = {name: tensor.to(dtype) for name, tensor in read_adapter(self.path).tensors.items()}
        return Weights(0, "lora", tensors, checksum(tensors, self.scale), self.scale)


class ServedPolicy:
    """One engine with one version, as an endpoint calls it."""

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        """`sampling` is that of a call that asks for nothing else; its `max_tokens` is the length of a context."""
        self._engine = engine
        self._sampling = sampling
        self._ids = count()

    async def generate(self, tokens: tuple[int, ...], _: int, __: bool, asked: RequestedSampling) -> Completion:
        """Continues tokens. Raises `RoomError` if none fits. A call that is cancelled leaves the engine."""
        room = self._sampling.max_tokens - len(tokens)
        if room < 1:
            raise RoomError(f"a context has at most {self._sampling.max_tokens:,} tokens")
        sampling = Sampling(
            max_tokens=min(room, asked.max_tokens or room),
            temperature=self._sampling.temperature if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            stop_tokens=self._sampling.stop_tokens,
            stop_strings=asked.stop,
            supports=False,
            routing=False,
        )
        seed = secrets.randbits(63) if asked.seed is None else asked.seed % 2**63
        id = next(self._ids)
        try:
            return await self._engine.generate(Request(id, 0, tokens, seed, sampling))
        except asyncio.CancelledError:
            await self._engine.abort([id])
            raise
        except RequestError as error:
            raise RoomError(str(error)) from error


def serve(folder: Path, options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serves the policy in a folder until Ctrl-C. Raises `RunError` or `ModelError` if it cannot be loaded."""
    refuse_missing_library()
    transformers_logging.disable_progress_bar()
    asyncio.run(_serve(PolicyFolder.find(folder), options, say))


async def _serve(policy: PolicyFolder, options: ServeOptions, say: Callable[[str], None]) -> None:
    say(f"loading {policy.path}")
    engine, calls, model = await load(policy, options)
    endpoint = Endpoint(calls, model, host=options.host, port=options.port)
    stopped = asyncio.Event()
    try:
        with stopped_by_interrupts(stopped.set):
            await endpoint.start()
            say(f"serving {policy.path} at {endpoint.url}/v1 with up to {calls.max_tokens(calls.key):,} tokens a call")
            if options.key is None:
                say(f"key: {calls.key}")
            await stopped.wait()
    finally:
        await endpoint.close()
        await engine.close()


async def load(
    policy: PolicyFolder, options: ServeOptions, conversations: MakeConversations | None = None
) -> tuple[Engine, OpenAccess, Model]:
    """Loads a policy into an engine. Returns what answers calls, and the model as clients see it.

    `conversations` None: those of the chat template, if there is one.
    """
    device = choose_device(options.device)
    dtype = choose_dtype("auto", device)
    config, tokenizer = load_config(policy.base), load_tokenizer(policy.tokenizer)
    model: Any = await asyncio.to_thread(load_model, policy.base, dtype, device)
    weights = await asyncio.to_thread(policy.weights, model)
    context = context_length(config)
    kv_tokens = _kv_tokens(config, dtype, device, options.rows)
    max_tokens = min(context, kv_tokens)

    def make() -> NativeEngine:
        return NativeEngine(
            model,
            kind=weights.kind,
            slots=1,
            rows=options.rows,
            kv_tokens=kv_tokens,
            max_context=max_tokens,
            lora_rank=policy.rank,
            lora_targets=None if policy.rank is None else sorted({name.rpartition(".")[0] for name in weights.tensors}),
            decode=decoder_of(tokenizer),
            records_routing=False,
        )

    threads = 1 if device.type == "cuda" else available_cores()
    engine = await asyncio.to_thread(ThreadedEngine, make, threads=threads, name="engine", longest=max_tokens)
    try:
        await engine.load(weights)
    except BaseException:
        await engine.close()
        raise
    if conversations is None and tokenizer.chat_template is not None:
        conversations = chat_conversations(tokenizer)
    sampling = Sampling(max_tokens, options.temperature, stop_tokens=stop_tokens(policy.base, config, tokenizer))
    calls = OpenAccess(
        ServedPolicy(engine, sampling).generate,
        conversations,
        key=options.key or f"sk-{secrets.token_urlsafe(24)}",
        max_tokens=max_tokens,
        vocabulary=int(config.get_text_config().vocab_size),
    )
    name = policy.path.resolve().name
    return engine, calls, Model(name, lambda token: str(tokenizer.decode([token])))


def _kv_tokens(config: Any, dtype: torch.dtype, device: torch.device, rows: int) -> int:
    """Returns the tokens of the KV cache: all rows at full length, or as many as memory holds."""
    wanted = rows * context_length(config)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(1, min(wanted, int(free * KV_SHARE) // kv_bytes_per_token(config, dtype, records_routing=False)))
    return max(1, min(wanted, (KV_GIB << 30) // kv_bytes_per_token(config, records_routing=False)))
