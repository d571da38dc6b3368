import numpy as np
import pytest
import torch
from torch import nn
from training_cases import random_batch, tiny

from stretto.objectives.grpo import GrpoOptions
from stretto.objectives.ppo import PpoOptions
from stretto.training.flops import Costs, peak_flops, utilization
from stretto.training.trainer import LocalTrainer, LoraOptions, TrainingOptions


@pytest.mark.parametrize(("trains_weights", "passes"), [(True, 3), (False, 2)])
def test_operations_are_those_of_the_products_and_of_causal_attention(trains_weights, passes):
    model, batch = tiny(), random_batch()
    layers = sum(m.weight.numel() for m in model.model.modules() if isinstance(m, nn.Linear))
    lengths = np.array([len(s.prompt) + len(s.completion.tokens) - 1 for s in batch.samples])
    completions = sum(len(s.completion.tokens) for s in batch.samples)
    products = 2 * passes * (layers * lengths.sum() + 23 * 32 * completions)
    attention = 3 * 2 * (2 * 4 * 8) * (lengths**2).sum()
    assert Costs(model, trains_weights=trains_weights).update(batch) == products + attention


def test_adapters_are_not_counted_and_an_unknown_peak_gives_no_utilization():
    plain = Costs(tiny(), trains_weights=False).update(random_batch())
    metrics = LocalTrainer(tiny(), lora=LoraOptions(rank=4)).update(random_batch()).metrics
    assert metrics["flops"] == plain
    assert "mfu" not in metrics
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
    assert utilization(6e12, 2.0, 10e12)["mfu"] == pytest.approx(0.3)


def forward(batch, *, head):
    model = tiny()
    layers = sum(m.weight.numel() for m in model.model.modules() if isinstance(m, nn.Linear))
    lengths = np.array([len(s.prompt) + len(s.completion.tokens) - 1 for s in batch.samples])
    completions = sum(len(s.completion.tokens) for s in batch.samples) if head else 0
    return 2 * (layers * lengths.sum() + 23 * 32 * completions) + 2 * (2 * 4 * 8) * (lengths**2).sum()


@pytest.mark.parametrize(
    ("algorithm", "steps", "passes"),
    [
        (GrpoOptions(), 1, []),
        (GrpoOptions(), 3, [True]),
        (PpoOptions(), 1, [False]),
        (PpoOptions(), 3, [True]),
        (GrpoOptions(kl={"coefficient": 0.1}), 1, [True]),
        (PpoOptions(kl={"coefficient": 0.1}), 3, [True, True]),
    ],
    ids=["plain", "steps", "critic", "critic and steps", "reference", "everything"],
)
def test_passes_before_the_first_step_are_counted_with_the_head_where_it_is_used(algorithm, steps, passes):
    batch = random_batch()
    trainer = LocalTrainer(
        tiny(), lora=LoraOptions(rank=4), algorithm=algorithm, options=TrainingOptions(optimizer_steps=steps)
    )
    plain = Costs(tiny(), trains_weights=False).update(batch)
    assert trainer.update(batch).metrics["flops"] == plain + sum(forward(batch, head=head) for head in passes)


def test_a_reference_of_its_own_counts_as_what_it_is():
    batch, small = random_batch(), tiny(num_hidden_layers=1)
    expected = Costs(small, trains_weights=False).forward(batch)
    trainer = LocalTrainer(tiny(), algorithm=GrpoOptions(kl={"coefficient": 0.1}), reference=small)
    plain = Costs(tiny(), trains_weights=True).update(batch)
    assert trainer.update(batch).metrics["flops"] == plain + expected
