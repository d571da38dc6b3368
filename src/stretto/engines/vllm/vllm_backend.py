"""vLLM in the child process: `AsyncLLM`, without a server. Imported in the child alone.

Seven properties of vLLM shape it:

- A request without an adapter in a batch with adapters may be computed with one of those, on the CPU. So every request
  of a LoRA policy names an adapter; version 0 is one whose `B` is zero.
- A generation whose adapter has no files ends the engine. `add_lora` with such files only raises. So `add_lora` comes
  first, and files stay until the adapter is removed.
- `add_lora` evicts an adapter if all slots are taken, also one in use. So there is one slot more than there are
  versions.
- The prefix cache knows an adapter by its name, and full weights not at all. So no name is used twice, and the cache is
  reset after a reload.
- Log-probabilities of a prompt beside running requests end the engine if its output layer takes adapters. So only the
  layers that have adapters do.
- After a reload on the CPU, a tied output layer has its old weights (`worker_extension.py`).
- In 0.26, an output without a new token, as an abort may be, carries the log-probabilities of the whole request. So
  only the last ones count, as many as there are new tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from stretto.engines.vllm import frames
from stretto.engines.vllm.lora_ranks import slot_rank
from stretto.engines.vllm.releases import check_release, installed_release


class VllmBackend:
    """The `Backend` of `child_server.py`."""

    def __init__(self) -> None:
        self._llm: Any
        self._options: frames.ChildOptions
        self._adapters: dict[int, Any] = {}  # by the number of the load: a `LoRARequest`
        self._requests: dict[int, str] = {}  # key -> vLLM's name of the request
        self._num_probes = 0
        self._held: str | None = None  # of the last load of full weights, or of the base of the adapters
        self._stamp = ""  # of the full weights, in the releases that stamp what they generate; empty: there is none

    async def start(self, options: frames.ChildOptions) -> frames.Ready:
        release = check_release(installed_release(), masks=options.masks)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._options = options
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(options)))
        except (ValueError, TypeError) as error:
            if not options.masks:
                raise
            # On the CPU, and in releases without it, vLLM has no sampling mask.
            raise RuntimeError(
                "`rollout.top_k` needs the sampling mask of vLLM, which it does not have on this device "
                f"(vLLM {release}: {error})"
            ) from error
        # The first request pays for what is made on demand. Nobody's deadline should.
        await self._score((0, 0), None)
        if options.kind == "lora":
            self._held = await self._digest()
        return frames.Ready(f"vllm {release}")

    def failure(self) -> str:
        llm = getattr(self, "_llm", None)
        return "vLLM's engine is dead" if llm is not None and llm.errored else ""

    # -- versions ------------------------------------------------------------------------------------------------------

    async def load_adapter(self, number: int, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        request = LoRARequest(lora_name=f"load-{number}", lora_int_id=number, lora_path=str(folder))
        if not await self._llm.add_lora(request):
            raise RuntimeError(f"`add_lora` has not taken the adapter in `{folder}`")
        self._adapters[number] = request

    async def remove_adapter(self, number: int) -> None:
        if self._adapters.pop(number, None) is not None:
            await self._llm.remove_lora(number)

    async def reload(self, number: int, folder: Path) -> None:
        await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        await self.repack_head()
        if not await self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache cannot be reset: requests are running")
        self._held = await self._digest()
        if hasattr(self._llm, "update_weight_version"):  # since 0.32
            self._stamp = f"load-{number}"
            await self._llm.update_weight_version(self._stamp)

    async def repack_head(self) -> None:
        """Has the workers use the new weights of a tied output layer, on the CPU."""
        if self._options.device == "cpu":
            await self._llm.collective_rpc("stretto_repack_head")

    async def held(self) -> str | None:
        return self._held

    async def _digest(self) -> str | None:
        """Returns a digest of vLLM's own checksums, of all tensors on all of its workers; None before 0.32."""
        if not hasattr(self._llm, "compute_weight_checksums"):
            return None
        state = hashlib.blake2b(digest_size=16)
        workers = await self._llm.compute_weight_checksums()
        for name, found in sorted(pair for worker in workers for pair in worker.items()):
            state.update(f"{name} {found}\n".encode())
        return state.hexdigest()

    async def score(self, tokens: Sequence[int], number: int) -> list[float]:
        return await self._score(tokens, self._adapters.get(number))

    async def _score(self, tokens: Sequence[int], adapter: Any) -> list[float]:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        how = SamplingParams(
            temperature=1.0,
            top_k=1 if self._options.masks else 0,  # the log-probabilities of a prompt are never truncated
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._num_probes += 1
        prompt, name = tokens_input(prompt_token_ids=list(tokens)), f"probe-{self._num_probes}"
        found: Any = None
        async for output in self._llm.generate(prompt, how, name, lora_request=adapter, priority=-1):
            found = output.prompt_logprobs
        if found is None or len(found) != len(tokens):
            raise RuntimeError("vLLM has not returned the log-probabilities of the probe")
        pairs = zip(found[1:], tokens[1:], strict=True)
        return [float(by_token[token].logprob) for by_token, token in pairs]

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, work: frames.Generate) -> AsyncIterator[frames.Piece]:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        # With masks vLLM takes no greedy request. The likeliest token alone is the same one.
        likeliest = self._options.masks and work.temperature <= 0
        how = SamplingParams(
            temperature=1.0 if likeliest else work.temperature,
            top_p=work.top_p,
            top_k=1 if likeliest else work.top_k,
            min_p=work.min_p,
            seed=work.seed,
            max_tokens=work.max_tokens,
            stop_token_ids=list(work.stop_tokens),
            ignore_eos=True,  # the stop tokens of the request are all that count
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        adapter = self._adapters[work.number] if self._options.kind == "lora" else None
        name = self._requests[work.key] = f"request-{work.key}"
        prompt = tokens_input(prompt_token_ids=list(work.prompt))
        first = True
        try:
            async for output in self._llm.generate(prompt, how, name, lora_request=adapter, priority=work.priority):
                made = output.outputs[0]
                tokens = tuple(made.token_ids)
                logprobs = _logprobs(made, tokens)
                reason = made.finish_reason
                if reason not in (None, "stop", "length", "abort"):
                    raise RuntimeError(f"vLLM has ended it with `{reason}`")
                self._refuse_other_stamps(made)
                finish = reason if reason != "abort" else None
                if tokens or finish is not None:
                    num_cached = (output.num_cached_tokens or 0) if first else 0
                    first = False
                    yield frames.Piece(work.key, tokens, logprobs, finish, num_cached, supports=_supports(work, made))
        finally:
            del self._requests[work.key]

    def _refuse_other_stamps(self, made: Any) -> None:
        """Raises `RuntimeError` if vLLM says that it has sampled a token under other weights than the last load.

        It says so with the last output of a request, also of one that was aborted.
        """
        spans = getattr(made, "weight_versions", None) if self._stamp else None
        if spans and {span.version for span in spans} != {self._stamp}:
            raise RuntimeError(f"vLLM has sampled under the weights {[span.version for span in spans]}")

    async def abort(self, keys: Sequence[int]) -> None:
        await self._llm.abort([self._requests[key] for key in keys if key in self._requests])


def _logprobs(made: Any, tokens: Sequence[int]) -> tuple[float, ...]:
    """Returns the log-probabilities of the new tokens. Raises `RuntimeError` if vLLM has not told those of all."""
    found = made.logprobs or ()
    if len(found) < len(tokens):
        raise RuntimeError(f"vLLM has told the log-probabilities of {len(found)} of {len(tokens)} tokens")
    last = found[len(found) - len(tokens) :]
    return tuple(float(by_token[token].logprob) for by_token, token in zip(last, tokens, strict=True))


def _supports(work: frames.Generate, made: Any) -> tuple[tuple[int, ...], ...] | None:
    """Returns what each of the new tokens was drawn from. Raises `RuntimeError` if vLLM has not told it of all."""
    if not work.supports:
        return None
    found = () if made.sampling_mask is None else tuple(tuple(map(int, each)) for each in made.sampling_mask.token_ids)
    if len(found) != len(made.token_ids) or not all(t in each for t, each in zip(made.token_ids, found, strict=True)):
        raise RuntimeError(f"vLLM has told the sampling mask of {len(found)} of {len(made.token_ids)} tokens")
    return found


def engine_arguments(options: frames.ChildOptions) -> dict[str, Any]:
    """Returns the arguments of vLLM's `AsyncEngineArgs`."""
    arguments: dict[str, Any] = {
        "model": options.model,
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "max_model_len": options.max_context,
        "max_num_seqs": options.rows,
        "max_num_batched_tokens": max(options.prefill_tokens, options.rows),
        "block_size": options.kv_block,
        "kv_cache_memory_bytes": options.kv_bytes // options.tensor_parallel,
        "tensor_parallel_size": options.tensor_parallel,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "stream_interval": options.stream_tokens,
        "generation_config": "vllm",  # the model's own defaults would change how tokens are drawn
        "worker_extension_cls": "stretto.engines.vllm.worker_extension.WorkerExtension",
    }
    if options.masks:
        arguments["return_sampling_mask"] = True
    if options.device == "cpu":
        arguments["enforce_eager"] = True
    if options.device_share is not None:
        arguments["gpu_memory_utilization"] = options.device_share
    if options.kind == "lora":
        arguments |= {
            "enable_lora": True,
            "max_loras": options.slots + 1,
            "max_cpu_loras": options.slots + 1,
            "max_lora_rank": slot_rank(options.lora_rank),
            "lora_target_modules": list(options.lora_targets),
        }
    return arguments
