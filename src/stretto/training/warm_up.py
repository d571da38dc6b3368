"""A pass of the trainer before the first update, so that what is made only once is not made in it.

The first pass traces and compiles the decoder layer, or loads what an earlier run has compiled, and loads kernels. That
takes seconds, in which no engine could capture a graph (`engines/native/capture_lock.py`).
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from stretto.training.packing import micro_batch
from stretto.training.trainer import LocalTrainer
from stretto.types import Completion, Sample

log = logging.getLogger(__name__)

LENGTH, PROMPT = 512, 32  # tokens of a sequence, and of its prompt
# Kernels are compiled for sizes like those of the first pass, so it must not be a small one. Above this, they do not
# change any more.
MOST_TOKENS = 16_384
FEWEST = 2  # sequences: a graph over a single one would be for single ones alone


def compiles(trainer: LocalTrainer) -> bool:
    """True if the first pass of a trainer takes much longer than later ones."""
    plain = trainer.packed.plain
    return trainer.device.type == "cuda" or (plain is not None and plain.compiled)


def warm_up(trainer: LocalTrainer, tokens: int) -> int:
    """Runs a forward and a backward pass over made-up sequences of `tokens` tokens, and discards the gradient.

    Policy, optimizer, counters and random numbers stay as they are, bit for bit. Fewer tokens are tried if memory runs
    out. Returns the tokens of the pass; 0 if none was possible, which the first update will say more about. For a
    trainer that has no gradient yet and is not sharded.
    """
    count = max(FEWEST, min(tokens, trainer.micro_tokens, MOST_TOKENS) // LENGTH)
    devices = [trainer.device] if trainer.device.type == "cuda" else []
    while count >= FEWEST:
        try:
            with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
                _run_pass(trainer, count)
            return count * LENGTH
        except torch.OutOfMemoryError:
            log.info("the warm-up over %d tokens ran out of memory", count * LENGTH)
        finally:
            trainer.optimizer.discard()
        count //= 2
    return 0


def _run_pass(trainer: LocalTrainer, count: int) -> None:
    packed = trainer.packed
    tokens = (np.arange(LENGTH) * 7 % packed.head.out_features).astype(np.int32)
    prompt = tokens[:PROMPT].tolist()  # of all sequences, so that kernels for shared prompts are loaded too
    zeros = np.zeros(LENGTH - PROMPT, dtype=np.float32)
    made = Completion(0, trainer.version, tokens[PROMPT:], zeros, "length", "")
    samples = [Sample(i, 0, trainer.version, prompt, made, 0.0) for i in range(count)]
    nothing = np.zeros(count)
    micro = micro_batch(
        samples, range(count), nothing, nothing, device=trainer.device, flash=packed.flash, multiple=packed.multiple,
        shares_prompts=packed.shares_prompts,
    )  # fmt: skip
    logprobs, _ = packed.logprobs(micro, trainer.temperature, entropy_gradient=trainer.algorithm.entropy is not None)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    if trainer.device.type == "cuda":
        torch.cuda.current_stream(trainer.device).synchronize()
