import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from stretto.errors import TrainerError
from stretto.training.optimizer import Optimizer
from stretto.training.options import TrainingOptions


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": -1.0},
        {"learning_rate": math.nan},
        {"schedule": "step"},
        {"warmup_steps": 100},
        {"betas": (0.9, 1.0)},
        {"micro_tokens": 0},
        {"final_fraction": 2.0},
    ],
)
def test_an_option_out_of_range_is_named(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        TrainingOptions(**wrong)


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return {"matrix": nn.Parameter(torch.randn(3, 4).to(dtype)), "vector": nn.Parameter(torch.randn(3).to(dtype))}


def give_gradients(named, seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in named.values():
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * size).to(parameter.dtype)


def test_a_step_is_adamws_with_clipping_and_decay_of_matrices_alone():
    ours, reference = parameters(), parameters()
    optimizer = Optimizer(ours, TrainingOptions(learning_rate=0.1, weight_decay=0.5, max_grad_norm=0.3))
    adam = torch.optim.AdamW(
        [
            {"params": [reference["matrix"]], "weight_decay": 0.5},
            {"params": [reference["vector"]], "weight_decay": 0.0},
        ],
        lr=0.1,
        betas=(0.9, 0.95),
    )
    for seed in range(3):
        give_gradients(ours, seed)
        give_gradients(reference, seed)
        expected = nn.utils.clip_grad_norm_(reference.values(), 0.3)
        adam.step()
        norm, rate = optimizer.step()
        assert norm == pytest.approx(float(expected))
        assert rate == 0.1
        assert ours["matrix"].grad is None
    for name in ours:
        assert torch.allclose(ours[name], reference[name], atol=1e-6)


def test_a_gradient_that_is_not_finite_raises_before_anything_changes():
    named = parameters()
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = Optimizer(named, TrainingOptions(learning_rate=0.1))
    give_gradients(named, 0)
    named["vector"].grad[1] = torch.nan
    with pytest.raises(TrainerError, match="norm is nan"):
        optimizer.step()
    assert optimizer.step_count == 0
    assert all(torch.equal(before[name], named[name]) for name in named)


def test_steps_too_small_for_half_precision_add_up_in_the_master():
    named = {"matrix": nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))}
    optimizer = Optimizer(named, TrainingOptions(learning_rate=1e-4, max_grad_norm=0.0))
    for _ in range(100):
        named["matrix"].grad = torch.ones(2, 2, dtype=torch.bfloat16)
        optimizer.collect()
        optimizer.step()
    assert named["matrix"].dtype == torch.bfloat16
    assert float(named["matrix"].detach()[0, 0]) == pytest.approx(0.99, abs=0.004)


def test_gradients_of_several_backward_passes_are_summed_in_float32():
    named = {"matrix": nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))}
    optimizer = Optimizer(named, TrainingOptions())
    for size in (1.0, *[1e-3] * 100):
        named["matrix"].grad = torch.full((2, 2), size, dtype=torch.bfloat16)
        optimizer.collect()
    assert optimizer.step()[0] == pytest.approx(2 * 1.1, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_bit_for_bit(dtype):
    def run(named, optimizer, seeds):
        for seed in seeds:
            give_gradients(named, seed)
            optimizer.collect()
            optimizer.step()

    options = TrainingOptions(learning_rate=0.1, warmup_steps=2, schedule="cosine", steps=9, weight_decay=0.1)
    whole = parameters(dtype)
    run(whole, Optimizer(whole, options), range(6))
    first = parameters(dtype)
    before = Optimizer(first, options)
    run(first, before, range(3))
    second = parameters(dtype)
    after = Optimizer(second, options)
    after.restore(before.state())
    run(first, before, [99])  # the state is a copy: what happens to its source does not reach it
    run(second, after, range(3, 6))
    assert all(torch.equal(whole[name], second[name]) for name in whole)


def test_a_state_of_other_parameters_is_refused():
    optimizer = Optimizer(parameters(), TrainingOptions())
    state = Optimizer({"other": nn.Parameter(torch.ones(2))}, TrainingOptions()).state()
    with pytest.raises(TrainerError, match="another model"):
        optimizer.restore(state)


def test_memory_that_runs_out_for_the_averages_leaves_nothing_stepped(monkeypatch):
    parameters = {"matrix": nn.Parameter(torch.ones(2, 2)), "vector": nn.Parameter(torch.ones(2))}
    optimizer = Optimizer(parameters, TrainingOptions(learning_rate=0.1))
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    made = torch.zeros_like

    def full(tensor, **options):
        if tensor.ndim == 1:
            raise torch.OutOfMemoryError("no memory")
        return made(tensor, **options)

    monkeypatch.setattr(torch, "zeros_like", full)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in parameters.values())
    monkeypatch.undo()
    optimizer.step()
    assert all(float(parameter.detach().max()) < 1 for parameter in parameters.values())
