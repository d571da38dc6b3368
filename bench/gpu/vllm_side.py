"""Generation by vLLM, as the benches ask for it. Imported where vLLM is installed, and only in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu.floor import traffic
from bench.gpu.shapes import RANK, write_adapter_folder, write_config_folder
from bench.gpu.sides import SLOTS, Ask, Outcome, expect

MAX_SEQUENCES = 512
MEMORY_SHARE = 0.9
OVERHEAD_BYTES = 8 << 30  # of activations and graphs, where vLLM does not say how many blocks it has


class VllmSide:
    """One vLLM engine with adapters as PEFT folders or without LoRA, with dummy weights or those of `model_folder`.

    What vLLM compiles is kept under `compile_cache`, where it is given. vLLM finds it again only for a model at the
    same path, so what it is given of the model then lies there too, and not in `folder`. With `kv_bytes` its cache has
    that size instead of what is left of 90 % of the device.
    """

    name = "vllm"

    def __init__(
        self,
        size: str,
        *,
        lora: bool,
        max_context: int,
        folder: Path,
        flat_logprobs: bool = False,
        model_folder: Path | None = None,
        compile_cache: Path | None = None,
        kv_bytes: int | None = None,
        dtype: str | None = None,  # None: bfloat16
    ) -> None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # read when vLLM is imported
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process has used CUDA already
        if compile_cache is not None:
            os.environ["VLLM_CACHE_ROOT"] = str(compile_cache.resolve())
        from vllm import LLM, SamplingParams

        self.size, self.lora = size, lora
        self._sampling: Any = SamplingParams
        # Flat log-probabilities spare vLLM's host some objects; off is what its users get.
        self._flat = {"flat_logprobs": True} if flat_logprobs else {}
        self._adapters: list[Any] = []
        extra: dict[str, Any] = {}
        if lora:
            from vllm.lora.request import LoRARequest

            extra = {"enable_lora": True, "max_loras": SLOTS, "max_lora_rank": RANK}
            for version in range(SLOTS):
                path = write_adapter_folder(folder / f"adapter-{version}", size, version)
                self._adapters.append(LoRARequest(f"version-{version}", version + 1, str(path)))
        if model_folder is None:
            place = folder if compile_cache is None else compile_cache.resolve() / "shapes" / size
            model, load_format = write_config_folder(place / "model", size), "dummy"
        else:
            model, load_format = model_folder, "auto"
        if kv_bytes is None:
            extra["gpu_memory_utilization"] = MEMORY_SHARE
        else:  # the share is looked at all the same: that much has to be free at the start
            total = torch.cuda.get_device_properties(0).total_memory
            extra |= {"kv_cache_memory_bytes": kv_bytes, "gpu_memory_utilization": kv_bytes / total}
        began = time.perf_counter()
        self._llm: Any = LLM(
            model=str(model),
            load_format=load_format,
            skip_tokenizer_init=True,
            dtype=dtype or "bfloat16",
            max_model_len=max_context,
            max_num_seqs=MAX_SEQUENCES,
            enable_prefix_caching=True,
            seed=0,
            **extra,
        )
        self.start_s = time.perf_counter() - began
        print(f"vLLM started in {self.start_s:.1f} s", flush=True)

    def room(self) -> int:
        cache = self._llm.llm_engine.vllm_config.cache_config
        if cache.num_gpu_blocks:
            return int(cache.num_gpu_blocks) * int(cache.block_size)
        needs = traffic(self.size)
        total = torch.cuda.get_device_properties(0).total_memory
        return int(MEMORY_SHARE * total - needs.all_bytes - OVERHEAD_BYTES) // needs.kv_bytes_per_token

    def prepare(self, rows: int, kv_tokens: int, max_context: int) -> None:
        """Nothing: one engine does for all of it."""
        if rows > MAX_SEQUENCES:
            raise ValueError(f"{rows} rows are asked of an engine made with `max_num_seqs = {MAX_SEQUENCES}`")

    def generate(self, asks: Sequence[Ask]) -> Outcome:
        seconds, outputs = self._run(asks, [ask.tokens for ask in asks])
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        expect(made, asks)
        assert outputs[0].outputs[0].logprobs is not None
        return Outcome(seconds, made, {"cached": sum(output.num_cached_tokens or 0 for output in outputs)})

    def completions(self, asks: Sequence[Ask]) -> list[tuple[list[int], list[float]]]:
        """Tokens of each ask, and the log-probability of each token."""
        _, outputs = self._run(asks, [ask.tokens for ask in asks])
        made = [output.outputs[0] for output in outputs]
        expect(sum(len(each.token_ids) for each in made), asks)
        return [
            (
                list(each.token_ids),
                [here[token].logprob for token, here in zip(each.token_ids, each.logprobs, strict=True)],
            )
            for each in made
        ]

    def filled_steps(self, asks: Sequence[Ask], steps: int) -> Outcome:
        """The prompts are in the cache of prefixes, so that runs to 1 and to `steps + 1` tokens differ by the steps."""
        self._run(asks, [1] * len(asks))
        short, outputs = self._run(asks, [1] * len(asks))
        long, _ = self._run(asks, [1 + steps] * len(asks))
        prompt_tokens = sum(len(ask.prompt) for ask in asks)
        share = sum(output.num_cached_tokens or 0 for output in outputs) / prompt_tokens
        if share < 0.95:
            raise RuntimeError(f"only {share:.0%} of the prompts were cached: the batch does not fit")
        context = prompt_tokens / len(asks) + steps / 2
        details = {"context_mean": context, "step_ms": 1e3 * (long - short) / steps, "one_token_s": short}
        return Outcome(long - short, steps * len(asks), {**details, "cached_share": share})

    def _run(self, asks: Sequence[Ask], lengths: Sequence[int]) -> tuple[float, list[Any]]:
        prompts = [{"prompt_token_ids": list(ask.prompt)} for ask in asks]
        sampling = [
            self._sampling(max_tokens=n, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False, **self._flat)
            for n in lengths
        ]
        adapters = [self._adapters[ask.version] for ask in asks] if self.lora else None
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters)
        return time.perf_counter() - began, outputs
