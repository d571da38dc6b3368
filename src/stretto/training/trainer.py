"""The trainer: one update is one call, in this process.

An update runs in this order:

1. Split the batch into mini-batches, one an optimizer step, and those into micro-batches without padding.
2. Compute what must be known before the first step (`update_preparation.py`): log-probabilities under the policy as it
   is, under a reference and under the versions that sampled, and a critic's values.
3. Compute advantages from the rewards of the whole batch.
4. For each mini-batch: a forward and a backward pass for each micro-batch, then one optimizer step.

The objective is an argument; nothing here depends on which one it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stretto.errors import ModelError, RecipeError, TrainerError, describe
from stretto.models.adapters import Adapter, install_adapter
from stretto.models.float16_range import range_hint
from stretto.models.lora import inject_lora
from stretto.models.lora_options import LoraOptions
from stretto.models.routing import ExpertLoads, expert_metrics, recorded_loads, replayed_shape, routing_shape
from stretto.objectives.base import ObjectiveOptions
from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.length_options import OverlongOptions, overlong_refusal
from stretto.training.advantages import Advantages
from stretto.training.batch_advantages import refuse_overflow, shaped_rewards, without_gradient
from stretto.training.critic import make_critic
from stretto.training.failure_reasons import refuse_diverged, why_not_finite
from stretto.training.flops import Costs, peak_flops, update_flops, utilization
from stretto.training.forward import PackedModel
from stretto.training.learning_rates import LearningRates
from stretto.training.loss_averaging import with_divisor
from stretto.training.loss_scaling import LossScale, initial_loss_scale
from stretto.training.micro_batch_loss import masked, micro_batch_loss, objective_tokens
from stretto.training.mini_batches import MicroBatchPlan, MiniBatch, computed_samples, split_batch
from stretto.training.optimizer import Optimizer
from stretto.training.options import TrainingOptions
from stretto.training.packing import MicroBatch, micro_batch
from stretto.training.parallel import Ranks
from stretto.training.policy_weights import PolicyWeights
from stretto.training.probes import score_probe
from stretto.training.protocol import Trainer
from stretto.training.reference_policy import Reference, make_reference
from stretto.training.reward_shaping import ShapedRewards
from stretto.training.sequence_sizes import SequenceSizes, input_lengths
from stretto.training.sharding import Sharding, wants_sharding
from stretto.training.teachers import Teachers, teacher_metrics
from stretto.training.token_reports import token_reports
from stretto.training.trainer_files import base_entry, read_state, write_state
from stretto.training.update_metrics import (
    TokenCollector,
    TokenValues,
    batch_metrics,
    concatenate,
    merge,
    mismatch,
    staleness_metrics,
    token_metrics,
)
from stretto.training.update_preparation import UpdatePreparation
from stretto.types import Batch, TokenReport, UpdateReport, Weights

__all__ = ["GrpoOptions", "LocalTrainer", "LoraOptions", "Trainer", "TrainingOptions"]


@dataclass(frozen=True, slots=True)
class _Gradient:
    """The gradient of one optimizer step."""

    loss: float
    norm: torch.Tensor  # before clipping
    norm_value: float  # the same number, read from the device
    tokens: TokenValues


@dataclass(frozen=True, slots=True)
class _Measurements:
    """The report of an update, except for its time."""

    metrics: dict[str, float]
    mismatch_kl_sum: float
    mismatch_tokens: int
    flops: float
    advantages: str  # their digest
    tokens: Sequence[TokenReport] = ()


class LocalTrainer:
    """Trains a Hugging Face causal LM in this process, in full or by LoRA.

    The trainer owns the module tree of `model`: it sets its attention and, with `lora`, replaces its linear layers. The
    Parameters may be shared with others; with `lora` they never change. The same state and batch give the same weights,
    bit for bit, for the same number of threads. On CUDA that needs `torch.use_deterministic_algorithms`, because flash
    attention sums its gradient in the order in which its blocks end.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lora: LoraOptions | None = None,
        adapter: Adapter | None = None,  # that the policy begins with; None: a new one
        options: TrainingOptions | None = None,
        rates: LearningRates | None = None,  # of all phases of the run; None: those of `options`
        algorithm: ObjectiveOptions | None = None,
        tokenizer: Any = None,  # exported with the model
        base: str | None = None,  # the base model that an exported adapter names; None: the model's `name_or_path`
        reference: nn.Module | None = None,  # of the divergence; None: the policy that training begins with
        teachers: Sequence[nn.Module] = (),  # those of the algorithm, in its order
        vocabulary: int | None = None,  # tokens that teachers and policy share; None: all that a model has
        ranks: Ranks | None = None,  # that train this policy together; None: this process alone
        sharded: bool | None = None,  # full weights over the ranks; None: if they are many
        temperature: float = 1.0,  # that the engine samples with
        max_tokens: int = 0,  # of a completion of the run, for the overlong penalty
        seed: int = 0,  # of the adapters' initial values
        probes: bool = False,  # weights carry a probe, for engines that give receipts
    ) -> None:
        if not temperature > 0:
            raise RecipeError(
                f"`temperature = {temperature}` leaves nothing to learn from: greedy samples have no "
                "log-probability; choose one above 0"
            )
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise ModelError("the model was loaded under `torch.inference_mode`, so it cannot train: load it outside")
        self.model: Any = model
        self.options = options or TrainingOptions()
        self.temperature, self.max_tokens, self.probes = temperature, max_tokens, probes
        self.algorithm = with_divisor(algorithm or GrpoOptions(), max_tokens)
        if isinstance(self.algorithm.length, OverlongOptions) and (
            reason := overlong_refusal(self.algorithm.length, max_tokens=max_tokens)
        ):
            raise RecipeError(reason)
        self.ranks = ranks or Ranks()
        self.tokenizer = tokenizer
        self.model.eval()  # no dropout: a ratio compares two policies, not two masks
        self.routing = replayed_shape(model.config, self.options.routing, keeps=self.options.keep_routing)
        shape = routing_shape(model)
        self.loads = None if shape is None else ExpertLoads(shape, next(model.parameters()).device)
        self.packed = PackedModel(model)
        adapted: tuple[str, ...] = ()
        if lora is not None:
            adapted = inject_lora(model, lora.rank, lora.effective_alpha, lora.targets, seed)
            if adapter is not None:
                install_adapter(model, adapted, adapter)
        else:
            model.requires_grad_(True)
        self.device = self.packed.head.weight.device
        self.ranks.check_same(dict(model.named_parameters()))
        self.sharding = self._prepare(sharded=wants_sharding(model, self.ranks, sharded, lora=lora is not None))
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = Optimizer(trainable, self.options, self.ranks, rates)
        base = base if base is not None else str(getattr(model, "name_or_path", ""))
        self.policy = PolicyWeights(model, lora, adapted, base, self.ranks, self.sharding)
        self.costs = Costs(model, trains_weights=lora is None, shares_prompts=self.packed.shares_prompts)
        peak = peak_flops(self.device, self.packed.head.weight.dtype)
        self.peak = None if peak is None else peak * self.ranks.count
        self.reference: Reference | None = None
        if self.algorithm.kl is not None:
            self.reference = make_reference(self.packed, reference, self.ranks, starts_from_adapter=adapter is not None)
        self.teachers = Teachers(
            self.algorithm, teachers, self.packed, self.ranks, vocabulary=vocabulary, temperature=temperature
        )
        self.critic = make_critic(
            self.algorithm,
            self.packed.head.in_features,
            device=self.device,
            dtype=self._dtype,
            max_grad_norm=self.options.max_grad_norm,
        )
        self.scale = initial_loss_scale(self.packed.head.weight.dtype)
        self.preparation = UpdatePreparation(
            self.packed,
            self.policy,
            self.algorithm,
            self.ranks,
            options=self.options,
            critic=self.critic,
            reference=self.reference,
            teachers=self.teachers,
            temperature=temperature,
            pack=self._pack,
            empty_pass=None if self.sharding is None else self._empty_pass,
        )
        self._scored: Sequence[Sequence[int]] = ()  # samples that were scored in this update, by version
        self._version = 0

    def _prepare(self, *, sharded: bool) -> Sharding | None:
        """Prepares the model for passes, and shards it if asked to."""
        if not sharded:
            self.packed.prepare(compiled=self.options.compile, checkpointing=self.options.checkpointing)
            return None
        if self.options.compile:
            raise RecipeError(
                "`training.compile = true` needs whole layers, and full weights of several ranks are sharded: leave it "
                "out, train with `model.lora`, or with `runtime.trainers = 1`"
            )
        # Sharded layers run through their own modules, because FSDP gathers them there.
        self.packed.prepare(compiled=False, checkpointing=self.options.checkpointing, plain=False)
        return Sharding(self.packed, self.ranks)

    @property
    def version(self) -> int:
        return self._version

    @property
    def weights_dtype(self) -> torch.dtype:
        """The type of the weights that are trained, or that adapters are trained over."""
        dtype: torch.dtype = self.packed.head.weight.dtype
        return dtype

    @property
    def micro_tokens(self) -> int:
        return self.options.micro_batch_tokens

    @property
    def shares_prompts(self) -> bool:
        """True if the policy, the reference and all teachers compute a prompt once for all samples that have it.

        They get the same micro-batches, which must be small enough for one that does not.
        """
        others = [] if self.reference is None else [self.reference.packed.shares_prompts]
        return all([self.packed.shares_prompts, *others, *(each.shares_prompts for each in self.teachers.members)])

    def smaller_micro_batches(self, batch: Batch) -> int | None:
        sizes = SequenceSizes.of(batch.samples, shares_prompts=self.shares_prompts)
        return sizes.smaller(batch.micro_tokens or self.micro_tokens)

    def update(self, batch: Batch) -> UpdateReport:
        started = time.perf_counter()
        if batch.update != self.version:
            raise TrainerError(f"update {batch.update} was asked for, but the trainer holds version {self.version}")
        if not batch.samples:
            raise TrainerError(f"update {batch.update} has an empty batch")
        shaped = shaped_rewards(batch, self.algorithm, max_tokens=self.max_tokens)
        known = None
        if not self.preparation.advantages_need_passes:
            known = self.preparation.advantages(batch, [], shaped.rewards)
        mini_batches = self._split(batch, None if known is None else known[0])
        # If an update fails after a step, it must be undone: a later step may fail, or the weights of the last one.
        undoable = len(mini_batches) > 1 or self.critic is not None or self.optimizer.may_overflow
        before = self.state() if undoable else None
        scale, steps = self.scale, self.optimizer.steps_begun
        try:
            with torch.inference_mode(False):
                with self.ranks.together(collective_passes=self.sharding is not None):
                    self._scored = self.preparation.run_passes(batch, mini_batches)
                measured = self._run_steps(batch, mini_batches, shaped, known)
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()  # the update ends before its time is taken
        except BaseException as error:
            self.optimizer.discard()
            if self.critic is not None:
                self.critic.discard()
            if before is not None:
                self.restore(before)
            self.scale = scale
            if before is None and self.optimizer.steps_begun > steps and isinstance(error, RuntimeError):
                raise TrainerError(
                    f"update {batch.update} failed after its optimizer step had begun, which cannot be undone: "
                    f"{describe(error)}. Resume the run: it goes on from its last checkpoint"
                ) from error
            raise
        self._version += 1
        self.scale = None if self.scale is None else self.scale.after_update()
        seconds = time.perf_counter() - started
        metrics = {**measured.metrics, "seconds": seconds, **utilization(measured.flops, seconds, self.peak)}
        return UpdateReport(
            batch.update, metrics, measured.mismatch_kl_sum, measured.mismatch_tokens, seconds, measured.advantages,
            tokens=measured.tokens,
        )  # fmt: skip

    def _split(self, batch: Batch, advantages: Advantages | None) -> list[MiniBatch]:
        """Splits the batch into mini-batches, without the samples that cannot change the policy.

        `advantages` None: they are computed from passes over every sample.
        """
        skipped = None
        if batch.skips and advantages is not None:
            skipped = without_gradient(batch, self.algorithm, advantages)
        return split_batch(
            batch.samples, self.algorithm, num_steps=self.options.optimizer_steps,
            micro_tokens=batch.micro_tokens or self.micro_tokens, rank=self.ranks.rank, num_ranks=self.ranks.count,
            shares_prompts=self.shares_prompts, skipped=skipped,
        )  # fmt: skip

    def _run_steps(
        self,
        batch: Batch,
        mini_batches: list[MiniBatch],
        shaped: ShapedRewards,
        known: tuple[Advantages, Mapping[str, float]] | None,
    ) -> _Measurements:
        """Runs the optimizer steps of an update. Measures before the last step: until then the update can be undone.

        `known` are the advantages, with metrics, if no pass was needed for them.
        """
        advantages, critic_metrics = known or self.preparation.advantages(batch, mini_batches, shaped.rewards)
        refuse_overflow(batch, advantages, self._dtype)
        if self.loads is not None:
            self.loads.taken()  # of an update that failed
        collector, gradients = TokenCollector(), list[_Gradient]()
        for mini_batch in mini_batches[:-1]:
            gradients.append(self._compute_gradient(batch, mini_batch, advantages, collector))
            self._step(batch, gradients[-1])
        gradients.append(self._compute_gradient(batch, mini_batches[-1], advantages, collector))
        metrics = {**shaped.metrics, **critic_metrics}
        if self.critic is not None:
            metrics["critic_grad_norm"] = self.critic.last_norm
        measured = self._measure(batch, mini_batches, advantages, gradients, metrics)
        self._step(batch, gradients[-1])
        return measured

    def _measure(
        self,
        batch: Batch,
        mini_batches: list[MiniBatch],
        advantages: Advantages,
        gradients: list[_Gradient],
        metrics: Mapping[str, float],  # measured before
    ) -> _Measurements:
        computed = computed_samples(mini_batches)
        tokens = concatenate([each.tokens for each in gradients])
        engine = mismatch(batch, tokens)
        metrics = {
            "loss": sum(each.loss for each in gradients) / len(gradients),
            "grad_norm": sum(each.norm_value for each in gradients) / len(gradients),
            "learning_rate": self.optimizer.rates.at(batch.update),
            **batch_metrics(batch, advantages, uses_rewards=self.algorithm.uses_rewards),
            **metrics,
            **staleness_metrics(batch, tokens),
            **engine.metrics,
            **self._load_metrics(batch),
            "skipped_sequences": float(len(batch.samples) - len(computed)),
            "micro_tokens": float(batch.micro_tokens or self.micro_tokens),
            **({"micro_tokens_lowered": 1.0} if batch.lowered else {}),
            "micro_batches": float(sum(mini_batch.num_micro_batches for mini_batch in mini_batches)),
            "optimizer_steps": float(len(mini_batches)),
            **({} if self.scale is None else {"loss_scale": self.scale.value}),
        }
        of_tokens = token_metrics(tokens, uses_rewards=self.algorithm.uses_rewards)
        metrics = merge({**of_tokens, **teacher_metrics(batch, self.algorithm, tokens)}, metrics)
        flops = update_flops(
            self.costs, batch, computed, num_steps=len(mini_batches), critic=self.critic is not None,
            reference=None if self.reference is None else self.reference.costs, scored=self._scored,
        ) + self.teachers.flops(batch, computed)  # fmt: skip
        scale = None if self.scale is None else self.scale.value
        reports = token_reports(batch, tokens, advantages, scale) if batch.reports_tokens else ()
        return _Measurements(metrics, engine.kl_sum, engine.tokens, flops, advantages.digest(), reports)

    def _load_metrics(self, batch: Batch) -> dict[str, float]:
        """Returns the load of experts: of all recorded tokens, or of those that this update has computed."""
        if self.loads is None:
            return {}
        records = [sample.completion.routing for sample in batch.samples if sample.completion.routing is not None]
        if records:
            return expert_metrics(recorded_loads(records, self.loads.shape))
        return expert_metrics(self.ranks.total(self.loads.taken()))

    # -- micro-batches -------------------------------------------------------------------------------------------------

    def _pack(
        self,
        batch: Batch,
        plan: MicroBatchPlan,
        packed: PackedModel | None = None,  # None: the policy's
        advantages: NDArray[np.float64] | None = None,  # [n]
        weights: NDArray[np.float64] | None = None,  # [n]
    ) -> MicroBatch:
        zeros = np.zeros(len(batch.samples))
        routing = self.routing if packed is None else None  # a reference or a teacher routes by itself
        packed = packed or self.packed
        return micro_batch(
            batch.samples, plan.samples, zeros if advantages is None else advantages,
            zeros if weights is None else weights, device=self.device, dtype=self._dtype,
            flash=packed.flash, multiple=packed.multiple, shares_prompts=packed.shares_prompts, routing=routing,
        )  # fmt: skip

    def _empty_pass(self, batch: Batch) -> torch.Tensor:
        """Runs a pass over the shortest sample that counts for nothing, and returns its last hidden states."""
        shortest = int(np.argmin(input_lengths(batch.samples)))
        return self.packed.states(self._pack(batch, MicroBatchPlan((shortest,))))

    @property
    def _dtype(self) -> torch.dtype:
        """The type of everything that is computed from log-probabilities."""
        return torch.float64 if self.packed.head.weight.dtype == torch.float64 else torch.float32

    # -- an optimizer step ---------------------------------------------------------------------------------------------

    def _compute_gradient(
        self, batch: Batch, mini_batch: MiniBatch, advantages: Advantages, collector: TokenCollector
    ) -> _Gradient:
        """The gradient of a mini-batch; computed again with a lower loss scale if it exceeds the range of its type."""
        while True:
            found = self._sum_gradient(batch, mini_batch, advantages, collector)
            if self.scale is None or math.isfinite(found.norm_value):
                return found
            lowered = self.scale.lowered()
            if lowered is None:
                raise TrainerError(
                    f"the gradient's norm is {found.norm_value} at update {batch.update}, even with a loss scale of "
                    f"{self.scale.value:g}: nothing was stepped{range_hint(torch.float16)}"
                )
            self.scale = lowered
            self.optimizer.discard()
            if self.critic is not None:
                self.critic.discard()

    def _sum_gradient(
        self, batch: Batch, mini_batch: MiniBatch, advantages: Advantages, collector: TokenCollector
    ) -> _Gradient:
        """Sums the gradient over the micro-batches and the ranks. Raises `TrainerError` if the loss is not finite."""
        with self.ranks.together(collective_passes=self.sharding is not None), torch.enable_grad():
            for plan in mini_batch.micro_batches:
                self._backward(batch, mini_batch, plan, advantages, collector)
            for _ in range(mini_batch.num_empty_passes if self.sharding is not None else 0):
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
        own_loss, norm_value, own_tokens = collector.finish(norm)
        loss, tokens = self.ranks.combine(own_loss, norm_value, own_tokens)
        if not math.isfinite(loss):
            why = why_not_finite(batch, advantages, tokens, self.packed.head.weight.dtype)
            raise TrainerError(f"the loss of update {batch.update} is {loss}: {why}")
        if self.scale is None and not math.isfinite(norm_value):
            why = why_not_finite(batch, advantages, tokens, self.packed.head.weight.dtype)
            raise TrainerError(f"the gradient's norm is {norm_value} at update {batch.update}: {why}")
        if self.critic is not None:
            self.critic.check()
        return _Gradient(loss, norm, norm_value, tokens)

    def _step(self, batch: Batch, gradient: _Gradient) -> None:
        self.optimizer.step(gradient.norm, gradient.norm_value, update=batch.update)
        if self.critic is not None:
            self.critic.step()
        norms = [self.optimizer.weight_norm(), *([] if self.critic is None else [self.critic.weight_norm()])]
        refuse_diverged(batch.update, self.ranks.total(torch.stack(norms).cpu().numpy()).tolist())

    def _backward(
        self,
        batch: Batch,
        mini_batch: MiniBatch,
        plan: MicroBatchPlan,
        advantages: Advantages,
        collector: TokenCollector,
    ) -> None:
        """Runs the forward and the backward pass of a micro-batch, which adds to the gradient."""
        packed = self._pack(batch, plan, advantages=advantages.values, weights=mini_batch.weights)
        micro = masked(self.algorithm, batch, packed)
        if self.loads is not None and any(batch.samples[index].completion.routing is None for index in plan.samples):
            micro = replace(micro, layout=replace(micro.layout, loads=self.loads))
        states = self.packed.states(micro)
        logprobs, entropies = self.packed.logprobs(
            micro, self.temperature, entropy_gradient=self.algorithm.entropy is not None, states=states
        )
        tokens = objective_tokens(self.algorithm, batch, plan, micro, advantages, logprobs)
        loss, diagnostics = micro_batch_loss(self.algorithm, tokens, entropies, micro, mini_batch, plan)
        if self.teachers.members:
            teacher_loss, measured = self.teachers.loss(plan, micro, states, tokens)
            loss, diagnostics = loss + teacher_loss, merge(diagnostics, measured)
        if self.critic is not None:
            critic_loss, values = self.critic.micro_batch_loss(states, micro, plan)
            loss, diagnostics = loss + critic_loss, merge(diagnostics, {"value_loss": values})
        collector.watch(logprobs, tokens.anchor_logprobs(getattr(self.algorithm, "anchor", "behaviour")))
        scaled = loss if self.scale is None else loss * self.scale.value
        scaled.backward()  # type: ignore[no-untyped-call]
        self.optimizer.collect()
        collector.add(
            micro, loss, tokens.proximal, entropies.detach(), diagnostics,
            sampled=plan.sampled, is_scored=plan.is_scored,
        )  # fmt: skip

    # -- weights and state ---------------------------------------------------------------------------------------------

    def weights(self, version: int) -> Weights:
        if version != self.version:
            raise TrainerError(f"the weights of version {version} were asked for: the trainer holds {self.version}")
        weights = self.policy.weights(version)
        return replace(weights, probe=score_probe(self.packed, self.device)) if self.probes else weights

    def state(self, device: str | None = None) -> dict[str, torch.Tensor]:
        """Of sharded parameters it has this rank's shard; `save` writes them whole.

        The copy is made on `device`; None: where the tensors are. On the host, a GPU needs no memory for it.
        """
        critic = {} if self.critic is None else self.critic.state(device)
        scale = {} if self.scale is None else {"loss_scale": self.scale.state()}
        return {**self.optimizer.state(device), **critic, **scale, "version": torch.tensor(self._version)}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        restore_policy = self.optimizer.prepare_restore(state)
        restore_critic = None if self.critic is None else self.critic.prepare_restore(state)
        # Checkpoints from when an update was always one step have no `version`.
        version = state.get("version", state["step"])
        if version.numel() != 1:
            raise TrainerError(
                f"the checkpoint is not a trainer's: its `version` has {version.numel()} numbers; expected 1"
            )
        scale = initial_loss_scale(self.packed.head.weight.dtype)
        if scale is not None and "loss_scale" in state:
            scale = LossScale.of_state(state["loss_scale"])
        # Everything is checked and has its memory: nothing below can fail.
        self._version, self.scale = int(version), scale
        restore_policy()
        if restore_critic is not None:
            restore_critic()

    def adopt(self, weights: Weights) -> None:
        own = self.weights(weights.version)
        if own.checksum == weights.checksum:
            return  # the trainer's own weights may be more precise: adapters are rounded when they are handed over
        del own
        self.policy.check_names(weights)
        values = {f"value/{name}": tensor for name, tensor in weights.tensors.items()}
        self.restore({**self.state("cpu"), **(values if self.sharding is None else self.sharding.scattered(values))})

    def base_checksum(self) -> str | None:
        return self._base_checksum

    @cached_property
    def _base_checksum(self) -> str | None:
        """Computed once, because the base never changes."""
        return self.policy.base_checksum()

    def save(self, folder: Path) -> None:
        write = self.capture()
        with self.ranks.together():
            if self.ranks.rank == 0:  # every rank has the same state, or has sent its shards to rank 0
                write(folder)

    def capture(self) -> Callable[[Path], None]:
        state = self.state("cpu") if self.sharding is None else self.sharding.gathered(self.state())
        state = {**state, **base_entry(self.base_checksum(), self.weights_dtype)}
        tensors = {name: tensor.cpu().contiguous() for name, tensor in state.items()} if self.ranks.rank == 0 else {}
        return lambda folder: write_state(folder, tensors)

    def load(self, folder: Path) -> None:
        state = read_state(folder, base_entry(self.base_checksum(), self.weights_dtype))
        self.restore(state if self.sharding is None else self.sharding.scattered(state))

    def export(self, folder: Path) -> None:
        writers = [] if self.critic is None else [self.critic.export]
        self.policy.export(folder, *writers, *([] if self.tokenizer is None else [self.tokenizer.save_pretrained]))
