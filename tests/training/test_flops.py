import numpy as np
import pytest
import torch
from torch import nn
from training_cases import random_batch, tiny

from stretto.training.flops import Costs, peak_flops, utilization
from stretto.training.trainer import LocalTrainer, LoraOptions


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
