"""Probes: the trainer scores the fixed sequence under the weights that it hands over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training_cases import random_batch, tiny
from vllm_cases import logprobs_of

from stretto.models.lora_options import LoraOptions
from stretto.training.probes import NUM_TOKENS, probe_tokens
from stretto.training.trainer import LocalTrainer


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4)])
def test_the_probe_of_every_version_is_that_of_its_weights(lora: LoraOptions | None) -> None:
    model, plain = tiny(), tiny()
    trainer = LocalTrainer(model, lora=lora, probes=True, temperature=0.7)
    seen: list[Any] = []
    for version in range(2):
        weights = trainer.weights(version)
        assert weights.probe is not None
        wanted = logprobs_of(plain, weights, weights.probe.tokens)
        assert np.allclose(weights.probe.logprobs, wanted, atol=1e-4), "at temperature 1, whatever the rollout has"
        seen.append(weights.probe)
        if not version:
            trainer.update(random_batch())
    assert seen[0].tokens == seen[1].tokens
    assert not np.array_equal(seen[0].logprobs, seen[1].logprobs)


def test_weights_have_no_probe_unless_it_is_asked_for() -> None:
    assert LocalTrainer(tiny()).weights(0).probe is None


def test_the_tokens_of_the_probe_are_fixed_and_within_the_vocabulary() -> None:
    assert probe_tokens(40) == probe_tokens(40)
    assert len(probe_tokens(40)) == NUM_TOKENS
    assert set(probe_tokens(40)) <= set(range(40))
