"""Supervised training: the loss is that of the completions alone, whatever the micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from stretto.environments.demonstrations import Demonstration
from stretto.models.tiny import random_model
from stretto.training.supervised import SupervisedOptions, fit

DEMOS = [
    Demonstration((5, 6, 7), (8, 9, 1)),
    Demonstration((5,), (20, 21, 22, 23, 24, 25, 26, 1)),
    Demonstration((30, 31, 32, 33, 34, 35, 36), (9, 1)),
]


def options(**changes: Any) -> SupervisedOptions:
    values = {"steps": 1, "batch": 3, "learning_rate": 1e-3, "seed": 0, "micro_tokens": 1_000}
    return SupervisedOptions(**{**values, **changes})


def test_the_loss_is_the_mean_over_the_tokens_of_completions() -> None:
    model = random_model(2)
    total, count = 0.0, 0
    for demo in DEMOS:
        tokens = torch.tensor([[*demo.prompt, *demo.completion]])
        with torch.no_grad():
            logprobs = F.log_softmax(model(input_ids=tokens).logits[0], dim=-1)
        for place, token in enumerate(demo.completion, start=len(demo.prompt)):
            total -= logprobs[place - 1, token].item()
            count += 1
    (loss,) = fit(model, DEMOS, options())
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_micro_batches_change_nothing_but_rounding() -> None:
    whole, cut = random_model(2), random_model(2)
    assert fit(whole, DEMOS, options(steps=4)) == pytest.approx(fit(cut, DEMOS, options(steps=4, micro_tokens=10)))
    # AdamW divides by the size of a gradient, so the rounding of one near zero is a part of a step of 1e-3. How much of
    # it depends on the processor.
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_the_loss_falls_and_prompts_are_not_learned() -> None:
    model = random_model(2)
    losses = fit(model, DEMOS, options(steps=60))
    assert losses[-1] < 0.1 < losses[0]
    tokens = torch.tensor([[*DEMOS[2].prompt, *DEMOS[2].completion]])
    with torch.no_grad():
        logprobs = F.log_softmax(model(input_ids=tokens).logits[0], dim=-1)
    of_prompt = [logprobs[place - 1, DEMOS[2].prompt[place]].item() for place in range(1, 7)]
    assert max(of_prompt) < -1.0


def test_the_same_seed_gives_the_same_weights() -> None:
    one, other = random_model(2), random_model(2)
    assert fit(one, DEMOS, options(steps=5, batch=2)) == fit(other, DEMOS, options(steps=5, batch=2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_only_parameters_that_require_a_gradient_are_trained() -> None:
    model = random_model(2)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" in name)
    fit(model, DEMOS, options(steps=2))
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed
    assert all("layers.0" in name for name in changed)
