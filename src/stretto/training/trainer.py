"""The trainer that runs in this process.

An update is: the batch cut into parts, one an optimizer step, and those into micro-batches without padding; what has to
be known before the first step (log-probabilities under the policy as it is, and under a reference); advantages from the
rewards; then for each part, for each of its micro-batches one forward pass, the log-probabilities of the completion
tokens, the objective, one backward pass; and one optimizer step. The algorithm is an argument, and nothing here knows
which.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from stretto.errors import ModelError, RecipeError, TrainerError
from stretto.narrowing import range_hint
from stretto.objectives.base import ObjectiveOptions, Tokens
from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.shaping_options import OverlongOptions, overlong_refusal
from stretto.training.advantages import Advantages, outcome_advantages, penalized_advantages
from stretto.training.correction import correction_weights
from stretto.training.credit import turn_credit
from stretto.training.critic import make_critic
from stretto.training.flops import Costs, peak_flops, update_flops, utilization
from stretto.training.forward import PackedModel
from stretto.training.lora import LoraOptions, inject_lora
from stretto.training.measures import (
    Collector,
    TokenValues,
    batch_measures,
    beside,
    joined,
    mismatch,
    staleness_measures,
    token_measures,
)
from stretto.training.optimizer import Optimizer, TrainerOptions, learning_rate
from stretto.training.packing import MicroBatch, input_lengths, micro_batch, sampled_lengths
from stretto.training.parallel import Ranks
from stretto.training.parts import Part, Piece, cut_batch, pieces_of
from stretto.training.policy import Policy
from stretto.training.protocol import Trainer
from stretto.training.reference import Reference
from stretto.training.scaling import LossScale, scale_for
from stretto.training.shaping import Shaped, shape
from stretto.training.sharding import Sharding, wants_sharding
from stretto.training.terms import sampled_divergences, weighted_divergence
from stretto.types import Batch, UpdateReport, Weights

__all__ = ["GrpoOptions", "LocalTrainer", "LoraOptions", "Trainer", "TrainerOptions"]

STATE_FILE = "trainer.safetensors"


@dataclass(frozen=True, slots=True)
class _Gradient:
    """What one optimizer step is taken along."""

    loss: float
    norm: torch.Tensor  # of the gradient, before clipping
    value: float  # the same number, read from the device
    tokens: TokenValues


@dataclass(frozen=True, slots=True)
class _Measured:
    """What is told of an update, but for its time."""

    metrics: dict[str, float]
    mismatch_kl_sum: float
    mismatch_tokens: int
    flops: float


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
        algorithm: ObjectiveOptions | None = None,
        tokenizer: Any = None,  # exported beside the model
        base: str | None = None,  # what an adapter says it belongs to; None: the model's own `name_or_path`
        reference: nn.Module | None = None,  # what a divergence is measured against; None: the policy without adapters
        ranks: Ranks | None = None,  # those that train this policy together; None: this process alone
        sharded: bool | None = None,  # full weights cut over the ranks; None: where they are many
    ) -> None:
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise ModelError("the model was loaded under `torch.inference_mode`, so it cannot train: load it outside")
        self.model: Any = model
        self.options = options or TrainerOptions()
        self.algorithm: ObjectiveOptions = algorithm or GrpoOptions()
        if isinstance(self.algorithm.length, OverlongOptions) and (
            reason := overlong_refusal(self.algorithm.length, max_tokens=self.options.max_tokens)
        ):
            raise RecipeError(reason)
        self.ranks = ranks or Ranks()
        self.tokenizer = tokenizer
        self.model.eval()  # no dropout: a ratio compares two policies, not two masks
        self.packed = PackedModel(model)
        adapted: tuple[str, ...] = ()
        if lora is not None:
            adapted = inject_lora(model, lora.rank, lora.scale * lora.rank, lora.targets, self.options.seed)
        else:
            model.requires_grad_(True)
        self.device = self.packed.head.weight.device
        self.ranks.check_same(dict(model.named_parameters()))
        self.sharding: Sharding | None = None
        if wants_sharding(model, self.ranks, sharded, lora=lora is not None):
            if self.options.compile:
                raise RecipeError(
                    "`training.compile = true` is for layers that are whole, and full weights of several ranks are cut "
                    "over them: leave it out, train with `model.lora`, or with `runtime.trainers = 1`"
                )
            # Layers that are cut run through their own modules, which is where they are made whole.
            self.packed.prepare(compiled=False, checkpointing=self.options.checkpointing, lean=False)
            self.sharding = Sharding(self.packed, self.ranks)
        else:
            self.packed.prepare(compiled=self.options.compile, checkpointing=self.options.checkpointing)
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = Optimizer(trainable, self.options, self.ranks)
        base = base if base is not None else str(getattr(model, "name_or_path", ""))
        self.policy = Policy(model, lora, adapted, base, self.ranks, self.sharding)
        self.costs = Costs(model, trains_weights=lora is None)
        peak = peak_flops(self.device, self.packed.head.weight.dtype)
        self.peak = None if peak is None else peak * self.ranks.count
        self.reference: Reference | None = None
        if self.algorithm.kl is not None:
            if reference is not None:
                self.ranks.check_same(dict(reference.named_parameters()), "algorithm.kl.reference")
            self.reference = (
                Reference.without_adapters(self.packed)
                if reference is None
                else Reference.of_model(reference, self.packed)
            )
        self.critic = make_critic(
            self.algorithm,
            self.packed.head.in_features,
            device=self.device,
            dtype=self._dtype,
            max_grad_norm=self.options.max_grad_norm,
        )
        self.scale = scale_for(self.packed.head.weight.dtype)  # of the loss
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    def update(self, batch: Batch) -> UpdateReport:
        started = time.perf_counter()
        if batch.update != self.version:
            raise TrainerError(f"update {batch.update} was asked for, but the trainer holds version {self.version}")
        if not batch.samples:
            raise TrainerError(f"update {batch.update} has an empty batch")
        parts = cut_batch(
            batch.samples, self.algorithm, num_parts=self.options.optimizer_steps,
            micro_tokens=self.options.micro_tokens, rank=self.ranks.rank, num_ranks=self.ranks.count,
        )  # fmt: skip
        # A later step may fail when earlier ones are done, and then nothing may have changed.
        before = self.state() if len(parts) > 1 or self.critic is not None else None
        scale = self.scale
        try:
            with torch.inference_mode(False):
                with self.ranks.together(passes_meet=self.sharding is not None):
                    self._look_ahead(batch, parts)
                measured = self._steps(batch, parts)
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()  # it has ended when its time is taken
        except BaseException:
            self.optimizer.discard()
            if self.critic is not None:
                self.critic.discard()
            if before is not None:
                self.restore(before)
            self.scale = scale
            raise
        self._version += 1
        self.scale = None if self.scale is None else self.scale.after_update()
        seconds = time.perf_counter() - started
        metrics = {**measured.metrics, "seconds": seconds, **utilization(measured.flops, seconds, self.peak)}
        return UpdateReport(batch.update, metrics, measured.mismatch_kl_sum, measured.mismatch_tokens, seconds)

    def _steps(self, batch: Batch, parts: list[Part]) -> _Measured:
        """Make the steps of an update. What is told of it is made before the last one: until then it can be undone."""
        shaped = self._shaped(batch)
        advantages, judged = self._advantages(batch, parts, shaped.rewards)
        collector, gradients = Collector(), list[_Gradient]()
        for part in parts[:-1]:
            gradients.append(self._gradient(batch, part, advantages, collector))
            self._apply(batch, gradients[-1])
        gradients.append(self._gradient(batch, parts[-1], advantages, collector))
        told = {**shaped.metrics, **judged}
        if self.critic is not None:
            told["critic_grad_norm"] = self.critic.last_norm
        measured = self._measured(batch, parts, advantages, gradients, told)
        self._apply(batch, gradients[-1])
        return measured

    def _measured(
        self,
        batch: Batch,
        parts: list[Part],
        advantages: Advantages,
        gradients: list[_Gradient],
        told: Mapping[str, float],
    ) -> _Measured:
        tokens = joined([each.tokens for each in gradients])
        kl_sum, kl_tokens = mismatch(batch, tokens)
        metrics = {
            "loss": sum(each.loss for each in gradients) / len(gradients),
            "grad_norm": sum(each.value for each in gradients) / len(gradients),
            "learning_rate": learning_rate(batch.update, self.optimizer.options),
            **batch_measures(batch, advantages),
            **told,
            **staleness_measures(batch, tokens),
            "mismatch_kl": kl_sum / max(1, kl_tokens),
            "mismatch_tokens": float(kl_tokens),
            "micro_batches": float(sum(part.num_pieces for part in parts)),
            "optimizer_steps": float(len(parts)),
            **({} if self.scale is None else {"loss_scale": self.scale.value}),
        }
        metrics = beside(token_measures(tokens, len(batch.samples)), metrics)
        reference = None if self.reference is None else self.reference.costs
        flops = update_flops(
            self.costs, batch, num_steps=len(parts), critic=self.critic is not None, reference=reference
        )
        return _Measured(metrics, kl_sum, kl_tokens, flops)

    # -- before the first step -----------------------------------------------------------------------------------------

    def _look_ahead(self, batch: Batch, parts: list[Part]) -> None:
        """Fill in what has to be known of each token before anything is stepped, a pass over the batch each."""
        if len(parts) > 1 or self.critic is not None:
            with self.packed.as_in_training():
                for piece in pieces_of(parts):
                    micro = self._micro(batch, piece)
                    states = self.packed.states(micro)
                    if len(parts) > 1:  # a single step has it from its own forward pass
                        proximal, _ = self.packed.logprobs(micro, self.options.temperature, states=states)
                        piece.proximal = proximal.detach()
                    if self.critic is not None:
                        piece.values = self.critic.values(states, micro.predicts).detach()
                for _ in range(sum(self._missing(part) for part in parts)):
                    self._empty_pass(batch)
        if self.reference is not None:
            with self.reference.active() as packed, packed.as_in_training():
                for piece in pieces_of(parts):
                    micro = self._micro(batch, piece, packed=packed)
                    reference, _ = packed.logprobs(micro, self.options.temperature)
                    piece.reference = reference.detach()

    def _shaped(self, batch: Batch) -> Shaped:
        """The rewards, shaped by length."""
        return shape(
            [s.reward for s in batch.samples],
            [s.group for s in batch.samples],
            sampled_lengths(batch.samples),
            self.algorithm.length,
            max_tokens=self.options.max_tokens,
        )

    def _advantages(
        self, batch: Batch, parts: list[Part], rewards: NDArray[np.float64]
    ) -> tuple[Advantages, Mapping[str, float]]:
        """From the shaped rewards of the whole batch, whatever its parts, and what a critic says of itself.

        A divergence in the reward is taken off here. Groups without signal are those whose own rewards are equal: what
        is added to rewards differs between any two samples.
        """
        kl, groups = self.algorithm.kl, [s.group for s in batch.samples]
        penalties = np.zeros(len(batch.samples))
        if kl is not None and kl.place == "reward":
            own = sampled_divergences(batch, pieces_of(parts), kl.estimate)
            penalties = kl.coefficient * self.ranks.total(own)
        try:
            if self.critic is not None:
                pieces = list(pieces_of(parts))
                by_turn = self.algorithm.turns is not None
                judged = self.critic.judge(batch, pieces, rewards - penalties, self.ranks.total, by_turn=by_turn)
                return judged.advantages, judged.metrics
            if (turns := self.algorithm.turns) is not None:
                return turn_credit(self.algorithm.advantage, batch, rewards, penalties, gamma=turns.gamma), {}
            found = penalized_advantages(self.algorithm.advantage, rewards, penalties, groups)
            plain = outcome_advantages(self.algorithm.advantage, [s.reward for s in batch.samples], groups)
            return replace(found, num_without_signal=plain.num_without_signal), {}
        except ValueError as error:
            raise TrainerError(f"update {batch.update}: {error}") from error

    def _micro(
        self,
        batch: Batch,
        piece: Piece,
        advantages: NDArray[np.float64] | None = None,  # [n]
        weights: NDArray[np.float64] | None = None,  # [n]
        packed: PackedModel | None = None,
    ) -> MicroBatch:
        nothing = np.zeros(len(batch.samples))
        packed = packed or self.packed
        return micro_batch(
            batch.samples, piece.chosen, nothing if advantages is None else advantages,
            nothing if weights is None else weights, device=self.device, dtype=self._dtype,
            flash=packed.flash, multiple=packed.multiple,
        )  # fmt: skip

    @property
    def _dtype(self) -> torch.dtype:
        """Of everything that is computed of log-probabilities."""
        return torch.float64 if self.packed.head.weight.dtype == torch.float64 else torch.float32

    # -- a step --------------------------------------------------------------------------------------------------------

    def _gradient(self, batch: Batch, part: Part, advantages: Advantages, collector: Collector) -> _Gradient:
        """The gradient of a part's loss, made again with a smaller scale where it left the range of the type."""
        while True:
            found = self._summed(batch, part, advantages, collector)
            if self.scale is None or math.isfinite(found.value):
                return found
            lowered = self.scale.lowered()
            if lowered is None:
                raise TrainerError(
                    f"the gradient's norm is {found.value} at update {batch.update}, with a loss scale of "
                    f"{self.scale.value:g} still: nothing was stepped{range_hint(torch.float16)}"
                )
            self.scale = lowered
            self.optimizer.discard()
            if self.critic is not None:
                self.critic.discard()

    def _summed(self, batch: Batch, part: Part, advantages: Advantages, collector: Collector) -> _Gradient:
        """Sum the gradient of a part's loss over its micro-batches. Raises `TrainerError` if its loss is no number."""
        with self.ranks.together(passes_meet=self.sharding is not None), torch.enable_grad():
            for piece in part.pieces:
                self._accumulate(batch, part, piece, advantages, collector)
            for _ in range(self._missing(part)):
                (self._empty_pass(batch).sum() * 0.0).backward()  # type: ignore[no-untyped-call]
                self.optimizer.collect()
        if self.scale is not None:
            self.optimizer.unscale(self.scale.value)
            if self.critic is not None:
                self.critic.unscale(self.scale.value)
        self.ranks.add_gradients(self.optimizer.stepped)
        if self.critic is not None:
            self.ranks.add_gradients(self.critic.stepped)
        norm = self.optimizer.norm()
        own_loss, value, own_tokens = collector.finish(norm)
        loss, tokens = self.ranks.measured(own_loss, value, own_tokens)
        if not math.isfinite(loss):
            raise TrainerError(
                f"the loss of update {batch.update} is {loss}: a log-probability, the engine's or the trainer's, "
                f"is not finite{range_hint(self.packed.head.weight.dtype)}"
            )
        if self.critic is not None:
            self.critic.check()
        return _Gradient(loss, norm, value, tokens)

    def _apply(self, batch: Batch, gradient: _Gradient) -> None:
        """Step along the gradient that was summed."""
        self.optimizer.step(gradient.norm, gradient.value, update=batch.update)
        if self.critic is not None:
            self.critic.step()

    def _missing(self, part: Part) -> int:
        """Passes that this rank has to make beyond its own, where every pass is one of all ranks."""
        return part.most_pieces - len(part.pieces) if self.sharding is not None else 0

    def _empty_pass(self, batch: Batch) -> torch.Tensor:
        """A pass that counts for nothing, over the shortest sample: its last hidden states."""
        shortest = int(np.argmin(input_lengths(batch.samples)))
        return self.packed.states(self._micro(batch, Piece((shortest,))))

    def _accumulate(self, batch: Batch, part: Part, piece: Piece, advantages: Advantages, collector: Collector) -> None:
        micro = self._micro(batch, piece, advantages.values, part.weights)
        states = self.packed.states(micro)
        logprobs, entropies = self.packed.logprobs(
            micro, self.options.temperature, entropy_gradient=self.algorithm.entropy is not None, states=states
        )
        tokens = Tokens(
            logprobs=logprobs,
            behaviour=micro.behaviour_logprobs,
            proximal=logprobs.detach() if piece.proximal is None else piece.proximal,
            advantages=self._token_advantages(batch, piece, advantages, micro),
            rewards=self._of_sequences([batch.samples[index].reward for index in piece.chosen])[micro.sequences],
            sequences=micro.sequences,
            num_sequences=len(piece.chosen),
            lengths=self._of_sequences(micro.num_targets, torch.int64),
        )
        loss, diagnostics = self._loss(tokens, entropies, micro, part, piece)
        if self.critic is not None:
            critic_loss, values = self.critic.piece_loss(states, micro, piece)
            loss, diagnostics = loss + critic_loss, beside(diagnostics, {"value_loss": values})
        collector.watch(logprobs, tokens.anchored(getattr(self.algorithm, "anchor", "behaviour")))
        scaled = loss if self.scale is None else loss * self.scale.value
        scaled.backward()  # type: ignore[no-untyped-call]
        self.optimizer.collect()
        collector.add(micro, loss, tokens.proximal, entropies.detach(), diagnostics)

    def _loss(
        self, tokens: Tokens, entropies: torch.Tensor, micro: MicroBatch, part: Part, piece: Piece
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's share of the part's loss, with the diagnostics of its tokens."""
        algorithm = self.algorithm
        losses, diagnostics = algorithm.loss(tokens)
        if algorithm.correction is not None:
            weights, measured = correction_weights(algorithm.correction, tokens)
            losses, diagnostics = losses * weights, beside(diagnostics, measured)
        if algorithm.kl is not None:
            assert piece.reference is not None
            apart = weighted_divergence(algorithm.kl.estimate, tokens.logprobs, piece.reference, tokens.behaviour)
            diagnostics = beside(diagnostics, {"reference_kl": apart.detach()})
            if algorithm.kl.place == "loss":
                losses = losses + algorithm.kl.coefficient * apart
        if algorithm.entropy is not None:
            losses = losses - algorithm.entropy.coefficient * entropies
        loss = torch.dot(losses, micro.weights)
        if algorithm.supervised is not None:
            assert part.imitated is not None
            imitated = self._of_sequences(part.imitated[list(piece.chosen)])[micro.sequences]
            loss = loss - algorithm.supervised.coefficient * torch.dot(tokens.logprobs, imitated)
            diagnostics = beside(diagnostics, {"imitated_fraction": (imitated > 0).to(imitated.dtype)})
        return loss, diagnostics

    def _token_advantages(self, batch: Batch, piece: Piece, advantages: Advantages, micro: MicroBatch) -> torch.Tensor:
        """Of each token of a micro-batch [C]."""
        if advantages.tokens is None:
            return micro.advantages
        ends = np.cumsum(sampled_lengths(batch.samples))
        slices = np.split(advantages.tokens, ends[:-1])
        return self._of_sequences(np.concatenate([slices[index] for index in piece.chosen]))

    def _of_sequences(self, values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Numbers of the host on the device."""
        return torch.as_tensor(np.asarray(values)).to(self.device, dtype or self._dtype)

    # -- weights and state ---------------------------------------------------------------------------------------------

    def weights(self, version: int) -> Weights:
        if version != self.version:
            raise TrainerError(f"the weights of version {version} were asked for: the trainer holds {self.version}")
        return self.policy.weights(version)

    def state(self) -> dict[str, torch.Tensor]:
        """Of what is cut over the ranks it has this rank's part; what is saved is whole."""
        critic = {} if self.critic is None else self.critic.state()
        scale = {} if self.scale is None else {"loss_scale": self.scale.state()}
        return {**self.optimizer.state(), **critic, **scale, "version": torch.tensor(self._version)}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        take_policy = self.optimizer.taking(state)
        take_critic = None if self.critic is None else self.critic.taking(state)
        # Where an update was always one step, the version was not written apart.
        version = state.get("version", state["step"])
        if version.numel() != 1:
            raise TrainerError(
                f"the checkpoint is not a trainer's: its `version` has {version.numel()} numbers and does not fit"
            )
        scale = scale_for(self.packed.head.weight.dtype)
        if scale is not None and "loss_scale" in state:
            scale = LossScale.of_state(state["loss_scale"])
        # Everything fits and has its memory: from here on nothing fails.
        self._version, self.scale = int(version), scale
        take_policy()
        if take_critic is not None:
            take_critic()

    def adopt(self, weights: Weights) -> None:
        own = self.weights(weights.version)
        if own.checksum == weights.checksum:
            return  # what it holds may be finer than what is handed over, which adapters are rounded for
        del own
        if wrong := set(self.policy.names) ^ weights.tensors.keys():
            raise TrainerError(
                f"weights of version {weights.version} are of another policy: `{min(wrong)}` does not fit"
            )
        values = {f"value/{name}": tensor for name, tensor in weights.tensors.items()}
        self.restore({**self.state(), **(values if self.sharding is None else self.sharding.scattered(values))})

    def base_checksum(self) -> str | None:
        return self._base_checksum

    @cached_property
    def _base_checksum(self) -> str | None:
        """Made once: nothing ever changes the base."""
        return self.policy.base_checksum()

    @property
    def _base(self) -> dict[str, torch.Tensor]:
        """What a checkpoint of adapters says of their base: its checksum, by the type that it has."""
        if (made := self.base_checksum()) is None:
            return {}
        dtype = str(self.packed.head.weight.dtype).removeprefix("torch.")
        return {f"base/{dtype}": torch.tensor(list(bytes.fromhex(made)), dtype=torch.uint8)}

    def save(self, folder: Path) -> None:
        write = self.capture()
        with self.ranks.together():
            if self.ranks.rank == 0:  # every rank holds the same, or handed over what it holds
                write(folder)

    def capture(self) -> Callable[[Path], None]:
        state = self.state() if self.sharding is None else self.sharding.gathered(self.state())
        state = {**state, **self._base}
        tensors = {name: tensor.cpu().contiguous() for name, tensor in state.items()} if self.ranks.rank == 0 else {}

        def write(folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / STATE_FILE)

        return write

    def load(self, folder: Path) -> None:
        if not (folder / STATE_FILE).exists():
            raise TrainerError(f"`{folder}` is no checkpoint of a trainer: it has no `{STATE_FILE}`")
        if self.sharding is not None:
            self.restore(self.sharding.scattered(load_file(folder / STATE_FILE)))
            return
        state = load_file(folder / STATE_FILE, device=str(self.device))
        for name, own in self._base.items():
            if name in state and state[name].tolist() != own.tolist():
                raise TrainerError(
                    f"the checkpoint in `{folder}` has adapters of another base: give `model.path` as it was, or start "
                    "a new run"
                )
        self.restore(state)

    def export(self, folder: Path) -> None:
        beside = [] if self.critic is None else [self.critic.export]
        self.policy.export(folder, *beside, *([] if self.tokenizer is None else [self.tokenizer.save_pretrained]))
