"""The seam between the loop and training, and the trainer that runs in this process.

An update is: advantages from the rewards; the batch cut into micro-batches without padding; for each of them one
forward pass, the log-probabilities of the completion tokens, the objective, one backward pass; one optimizer step. The
algorithm is an argument, and nothing here knows which.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from stretto.checksums import checksum
from stretto.errors import ModelError, TrainerError
from stretto.training.advantages import Advantages
from stretto.training.flops import Costs, peak_flops, utilization
from stretto.training.forward import PackedModel
from stretto.training.lora import LoraOptions, inject_lora, lora_tensors, write_adapter
from stretto.training.losses import Algorithm, BatchView, GrpoOptions, token_weights
from stretto.training.measures import Collector, batch_measures, mismatch, token_measures
from stretto.training.optimizer import Optimizer, TrainerOptions
from stretto.training.packing import first_fit_decreasing, input_lengths, micro_batch
from stretto.types import Batch, UpdateReport, Weights

__all__ = ["GrpoOptions", "LocalTrainer", "LoraOptions", "Trainer", "TrainerOptions"]

STATE_FILE = "trainer.safetensors"


class Trainer(Protocol):
    """One policy in training. Called from one thread at a time; every method blocks until it is done.

    The trainer holds exactly one version. Update `n` turns version `n` into version `n + 1`.
    """

    @property
    def version(self) -> int:
        """The version that it holds: the number of updates done."""
        ...

    def update(self, batch: Batch) -> UpdateReport:
        """Make update `batch.update`. Raises `TrainerError`, by name, and then nothing has changed."""
        ...

    def weights(self, version: int) -> Weights:
        """A copy of the weights that it holds, with their checksum. On CUDA it is made on the current stream."""
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of everything that decides what later updates do."""
        ...

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` gave: later updates are then the same, bit for bit."""
        ...

    def save(self, folder: Path) -> None:
        """Write `state` to a folder."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        ...

    def export(self, folder: Path) -> None:
        """Write the policy for others to load: a Hugging Face model folder, or a PEFT adapter folder."""
        ...


class LocalTrainer:
    """Trains a Hugging Face causal LM in this process, in full or by LoRA.

    `model` is a module tree of the trainer's own: its attention is set and, with `lora`, its linear layers are
    replaced. Its Parameters may be shared; with `lora` they are never changed. The same state and batch give the same
    weights, bit for bit, for the same number of threads. On CUDA that needs `torch.use_deterministic_algorithms`: the
    gradient of flash attention is summed in the order in which its blocks end.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lora: LoraOptions | None = None,
        options: TrainerOptions | None = None,
        algorithm: Algorithm | None = None,
        tokenizer: Any = None,  # exported beside the model
        base: str | None = None,  # what an adapter says it belongs to; None: the model's own `name_or_path`
    ) -> None:
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise ModelError("the model was loaded under `torch.inference_mode`, so it cannot train: load it outside")
        self.model: Any = model
        self.options = options or TrainerOptions()
        self.algorithm: Algorithm = algorithm or GrpoOptions()
        self.lora = lora
        self.tokenizer = tokenizer
        self.base = base if base is not None else str(getattr(model, "name_or_path", ""))
        self.model.eval()  # no dropout: a ratio compares two policies, not two masks
        self.packed = PackedModel(model)
        self.adapted: tuple[str, ...] = ()
        if lora is not None:
            self.adapted = inject_lora(model, lora.rank, lora.scale * lora.rank, lora.targets, self.options.seed)
        else:
            model.requires_grad_(True)
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(trainable.values())).device
        self.packed.prepare(compiled=self.options.compile, checkpointing=self.options.checkpointing)
        self.optimizer = Optimizer(trainable, self.options)
        self.costs = Costs(model, trains_weights=lora is None)
        self.peak = peak_flops(self.device, self.packed.head.weight.dtype)

    @property
    def version(self) -> int:
        return self.optimizer.step_count

    def update(self, batch: Batch) -> UpdateReport:
        started = time.perf_counter()
        if batch.update != self.version:
            raise TrainerError(f"update {batch.update} was asked for, but the trainer holds version {self.version}")
        if not batch.samples:
            raise TrainerError(f"update {batch.update} has an empty batch")
        try:
            advantages = self.algorithm.advantages([s.reward for s in batch.samples], [s.group for s in batch.samples])
        except ValueError as error:
            raise TrainerError(f"update {batch.update}: {error}") from error
        collector = Collector()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                self._accumulate(batch, advantages, collector)
            norm = self.optimizer.norm()
            loss, norm_value, tokens = collector.finish(norm)
            if not math.isfinite(loss):
                raise TrainerError(
                    f"the loss of update {batch.update} is {loss}: a log-probability, the engine's or the trainer's, "
                    "is not finite"
                )
            _, rate = self.optimizer.step(norm, norm_value)
        except BaseException:
            self.optimizer.discard()
            raise
        kl_sum, kl_tokens = mismatch(batch, tokens)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the update has ended when its time is taken
        seconds = time.perf_counter() - started
        metrics = {
            "loss": loss,
            "grad_norm": norm_value,
            "learning_rate": rate,
            **batch_measures(batch, advantages),
            **token_measures(tokens, len(batch.samples)),
            "mismatch_kl": kl_sum / max(1, kl_tokens),
            "micro_batches": float(collector.num_micro_batches),
            "seconds": seconds,
            **utilization(self.costs.update(batch), seconds, self.peak),
        }
        return UpdateReport(batch.update, metrics, kl_sum, kl_tokens, seconds)

    def _accumulate(self, batch: Batch, advantages: Advantages, collector: Collector) -> None:
        """Sum the gradient of the whole batch's loss over its micro-batches."""
        samples = batch.samples
        weights = token_weights(np.array([len(s.completion.tokens) for s in samples]), self.algorithm.average)
        dtype = torch.float64 if self.packed.head.weight.dtype == torch.float64 else torch.float32
        for chosen in first_fit_decreasing(input_lengths(samples), self.options.micro_tokens):
            micro = micro_batch(
                samples, chosen, advantages.values, weights, device=self.device, dtype=dtype,
                flash=self.packed.flash, multiple=self.packed.multiple,
            )  # fmt: skip
            logprobs, entropies = self.packed.logprobs(micro, self.options.temperature)
            view = BatchView(micro.behaviour_logprobs, micro.advantages, micro.sequences, len(chosen))
            losses, diagnostics = self.algorithm.objective(logprobs, view)
            loss = torch.dot(losses, micro.weights)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.collect()
            collector.add(micro, loss, logprobs, entropies, diagnostics)

    def weights(self, version: int) -> Weights:
        if version != self.version:
            raise TrainerError(f"the weights of version {version} were asked for: the trainer holds {self.version}")
        if self.lora is not None:
            tensors = lora_tensors(self.model, self.adapted)
            return Weights(version, "lora", tensors, checksum(tensors, self.lora.scale), self.lora.scale)
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        tensors = {name: torch.empty_like(p) for name, p in parameters.items()}
        torch._foreach_copy_(list(tensors.values()), list(parameters.values()))
        return Weights(version, "full", tensors, checksum(tensors))

    def state(self) -> dict[str, torch.Tensor]:
        return self.optimizer.state()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.optimizer.restore(state)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu().contiguous() for name, tensor in self.state().items()}, folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        if not (folder / STATE_FILE).exists():
            raise TrainerError(f"`{folder}` is no checkpoint of a trainer: it has no `{STATE_FILE}`")
        self.restore(load_file(folder / STATE_FILE, device=str(self.device)))

    def export(self, folder: Path) -> None:
        if self.lora is not None:
            tensors = lora_tensors(self.model, self.adapted)
            write_adapter(folder, tensors, options=self.lora, base=self.base, names=self.adapted)
        else:
            self.model.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
