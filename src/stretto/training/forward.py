"""The forward pass of a Hugging Face causal LM over a packed micro-batch, up to the log-probabilities of its targets.

The decoder runs through its own modules, or as `PlainDecoder` if the model is plain. The head does not run as a module:
its logits would be the largest tensor by far, so `token_logprobs` computes them in chunks from the head's weight. Other
operations on the logits (a cap, a factor) are read from the config, and `PackedModel` checks on a few tokens that
nothing was missed.
"""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from stretto.errors import ModelError
from stretto.models.decoder import PlainDecoder, fits
from stretto.models.float16_range import range_hint
from stretto.models.float32_products import HALF
from stretto.models.loading import moving_rotary
from stretto.models.module_forward import run_modules
from stretto.models.packed_attention import (
    LAYOUT_ARGUMENT,
    PACKED_ATTENTION,
    PackedLayout,
    layout_of,
    packed_attention,
)
from stretto.models.routing import RoutingTap, replay_through_modules, replaying
from stretto.models.varlen_attention import flash_fits
from stretto.training.logprobs import token_logprobs
from stretto.training.packing import MicroBatch

_log = logging.getLogger(__name__)

NOTING_ATTENTION = "stretto_packed_noting"  # packed attention that notes the layers that use it
CHECK_LENGTHS = (7, 5)  # tokens of the sequences of the check at construction
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2}  # of a log-probability; a missed cap or a leak is far above it
HALF_TOLERANCE, HALF_SHARE = 0.5, 0.05  # transformers' modules round their stream and their logits, which may be large
PAD_TOKENS = 128  # micro-batches for flash attention are padded to a multiple of this: products prefer round sizes


def _parts(model: Any) -> tuple[Any, nn.Linear]:
    """Returns the decoder and the head of a model. Raises `ModelError` if it cannot be trained packed."""
    decoder, head = model.base_model, model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or decoder is model:
        raise ModelError(f"`{type(model).__name__}` is no causal LM with a linear head over a decoder")
    if moving := moving_rotary(model.config):
        raise ModelError(
            f"`{type(model).__name__}` with `rope_type = {moving!r}` cannot be trained packed: its angles change "
            "with the longest sequence of a micro-batch, so a log-probability would depend on its neighbours"
        )
    return decoder, head


def smallest_window(model: nn.Module) -> int | None:
    """Returns the smallest sliding window of a model's layers; None if no layer has one.

    Raises `ModelError` if a layer asks for what packed attention does not have, or mixes neighbours by other means.
    The values of the weights do not matter, so the model may be on the meta device. Its config is changed.
    """
    causal_lm: Any = model
    decoder, head = _parts(model)
    windows: list[int | None] = []

    def noting(module: nn.Module, *states: Any, sliding_window: int | None = None, **options: Any) -> Any:
        windows.append(sliding_window)
        return packed_attention(module, *states, **options)

    AttentionInterface.register(NOTING_ATTENTION, noting)
    causal_lm.config._attn_implementation = NOTING_ATTENTION
    device = head.weight.device
    ids = torch.zeros(sum(CHECK_LENGTHS), dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in CHECK_LENGTHS])
    run_modules(decoder, ids, positions, **{LAYOUT_ARGUMENT: layout_of(np.array(CHECK_LENGTHS), device)})
    layers = int(causal_lm.config.get_text_config().num_hidden_layers)
    if len(windows) < layers:
        raise ModelError(
            f"`{type(model).__name__}` cannot be trained packed: {len(windows)} of its {layers} layers attend through "
            "transformers' attention interface"
        )
    return min((window for window in windows if window is not None), default=None)


class PackedModel:
    """A causal LM with packed attention. The tree belongs to the caller, whose config is changed.

    Raises `ModelError` for an architecture whose packed log-probabilities are not those of its own forward pass: one
    that mixes neighbours by other means than attention, ignores position ids, has its own operations on the logits, or
    has angles that change with the longest sequence.

    `flash`: micro-batches are laid out for flash attention. It is fixed by device and type for the life of the model.
    `shares_prompts`: they compute a prompt once for all samples that have it, which that layout makes possible.
    """

    def __init__(self, model: nn.Module) -> None:
        causal_lm: Any = model
        self.model = causal_lm
        self.decoder, self.head = _parts(model)
        config = causal_lm.config.get_text_config()
        cap = getattr(config, "final_logit_softcapping", None)
        self.softcap = float(cap) if cap else None
        self.multiplier = float(getattr(config, "logit_scale", None) or 1.0)
        self.multiplier /= float(getattr(config, "logits_scaling", None) or 1.0)
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.flash = flash_fits(self.head.weight.device, self.head.weight.dtype, head_size)
        self.plain: PlainDecoder | None = None
        tap = RoutingTap(model)
        expected = self._own_logprobs()
        routing = tap.close()
        causal_lm.config._attn_implementation = PACKED_ATTENTION
        self._check(expected, routing)

    @property
    def shares_prompts(self) -> bool:
        return self.flash

    @property
    def multiple(self) -> int:
        """The number of tokens of a micro-batch is padded to a multiple of this."""
        return PAD_TOKENS if self.flash else 1

    def prepare(
        self, *, compiled: bool | None, checkpointing: bool, plain: bool | None = None, backend: str = "inductor"
    ) -> None:
        """Chooses the forward of the decoder. Called once, after the adapters are in place.

        With `plain`, `PlainDecoder` takes the place of transformers' modules; by default in half precision, where it
        rounds less often than they do, and with `compiled`. `compiled` is on by default if `PlainDecoder` runs on CUDA.
        Raises `ModelError` if `compiled` is true and `PlainDecoder` does not fit the model.
        """
        on_cuda = self.head.weight.is_cuda
        half_on_host = not on_cuda and self.head.weight.dtype in HALF
        plain = (self.flash or half_on_host or bool(compiled)) if plain is None else plain
        possible = fits(self.model) and (self.flash or not on_cuda)
        if compiled and not possible:
            raise ModelError(
                "`training.compile = true` is for plain decoders, on CUDA in half precision, and "
                f"`{type(self.model).__name__}` in `{self.head.weight.dtype}` is none: leave it out"
            )
        if plain and possible:
            tap = RoutingTap(self.model)
            expected = self._packed_logprobs()
            routing = tap.close()
            self.flash = True  # `PlainDecoder` has no buckets
            compiled = on_cuda if compiled is None else compiled
            self.plain = PlainDecoder(self.model, compiled=compiled, checkpointing=checkpointing, backend=backend)
            worst = self._beyond_rounding(self._packed_logprobs(routing), expected)
            if worst is not None:
                raise ModelError(
                    f"`{type(self.model).__name__}` is not the plain decoder that it looks like: its log-probabilities "
                    f"differ by {worst:.3g}{range_hint(self.head.weight.dtype)}"
                )
            return
        replay_through_modules(self.model)
        if self.flash:
            _log.warning("`%s` trains through transformers' modules: nothing is compiled", type(self.model).__name__)
        if checkpointing:
            self._checkpoint_layers()

    def _checkpoint_layers(self) -> None:
        """Computes the insides of each layer again in the backward pass."""
        for layer in self.decoder.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)

    def as_in_training(self) -> AbstractContextManager[object]:
        """Returns a context for values that are compared with those of a training pass.

        Compiled layers round differently, and they run only with gradients enabled. The caller detaches the results.
        """
        return torch.set_grad_enabled(self.plain is not None and self.plain.compiled)

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        """Returns the last hidden state of every token [T, d]."""
        if self.plain is not None:
            return self.plain(input_ids, position_ids, layout)
        output = run_modules(self.decoder, input_ids, position_ids, **{LAYOUT_ARGUMENT: layout})
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def states(self, micro: MicroBatch) -> torch.Tensor:
        """Returns the last hidden state of every token of a micro-batch [T, d]."""
        return self.hidden(micro.input_ids, micro.position_ids, micro.layout)

    def logprobs(
        self,
        micro: MicroBatch,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        states: torch.Tensor | None = None,  # the result of `states`, if the caller has it already
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the log-probability of every completion token [C], with gradient, and its entropy [C], without."""
        return token_logprobs(
            self.states(micro) if states is None else states,
            self.head.weight,
            micro.predicts,
            micro.targets,
            bias=self.head.bias,
            temperature=temperature,
            softcap=self.softcap,
            multiplier=self.multiplier,
            entropy=True,
            entropy_gradient=entropy_gradient,
            supports=micro.supports,
        )

    def scores(self, micro: MicroBatch, temperature: float) -> torch.Tensor:
        """Returns the log-probability of every completion token [C] as a training pass computes it, without gradient.

        Compiled layers keep their activations. They are given back here, before the next micro-batch makes its own.
        """
        with self.as_in_training():
            return self.logprobs(micro, temperature)[0].detach()

    def _check_sequences(self) -> list[torch.Tensor]:
        vocabulary = self.head.out_features
        return [torch.arange(n, device=self.head.weight.device) * 7 % vocabulary for n in CHECK_LENGTHS]

    @torch.no_grad()
    def _own_logprobs(self) -> torch.Tensor:
        """Returns the log-probabilities of the check sequences by the model itself, one sequence at a time."""
        self.model.config._attn_implementation = "eager"
        parts = []
        for ids in self._check_sequences():
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            logits = logits if logits.dtype == torch.float64 else logits.float()
            parts.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
        return torch.cat(parts)

    @torch.no_grad()
    def _packed_logprobs(self, routing: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the log-probabilities of the check sequences by the packed model, with the experts of `routing`."""
        sequences = self._check_sequences()
        lengths = np.array(CHECK_LENGTHS)
        ids = torch.cat(sequences)
        positions = torch.cat([torch.arange(n, device=ids.device) for n in CHECK_LENGTHS])
        predicts = torch.cat([torch.arange(n - 1, device=ids.device) for n in CHECK_LENGTHS])
        predicts[CHECK_LENGTHS[0] - 1 :] += CHECK_LENGTHS[0]
        layout = replace(layout_of(lengths, ids.device, flash=self.flash), routing=routing)
        hidden = self.hidden(ids, positions, layout)
        got, _ = token_logprobs(
            hidden,
            self.head.weight,
            predicts,
            ids[predicts + 1],
            bias=self.head.bias,
            softcap=self.softcap,
            multiplier=self.multiplier,
        )
        return got

    def _beyond_rounding(self, got: torch.Tensor, expected: torch.Tensor) -> float | None:
        """Returns the largest difference of log-probabilities if it is more than rounding; None if it is not."""
        dtype = self.head.weight.dtype
        differences = (got - expected).abs()
        allowed = TOLERANCE.get(dtype, HALF_TOLERANCE) + (HALF_SHARE if dtype in HALF else 0.0) * expected.abs()
        return None if bool((differences <= allowed).all()) else float(differences.max())

    def _check(self, expected: torch.Tensor, routing: torch.Tensor | None) -> None:
        with replaying(self.model, None if routing is None else routing.cpu().numpy()):
            worst = self._beyond_rounding(self._packed_logprobs(), expected)
        if worst is not None:
            raise ModelError(
                f"`{type(self.model).__name__}` cannot be trained packed: side by side, sequences have "
                f"log-probabilities that differ by {worst:.3g} from those that they have alone"
                f"{range_hint(self.head.weight.dtype)}"
            )
