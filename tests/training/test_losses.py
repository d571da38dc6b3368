import math

import numpy as np
import pytest
import torch

from stretto.errors import RecipeError
from stretto.training.losses import BatchView, GrpoOptions, token_weights


def view(behaviour, advantages):
    count = len(behaviour)
    return BatchView(
        torch.tensor(behaviour), torch.tensor(advantages), torch.zeros(count, dtype=torch.int64), num_sequences=1
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),  # up enough: no more reward for going on
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),  # down enough
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_a_token_is_clipped_on_the_side_where_it_has_gone_far_enough(ratio, advantage, expected, slope):
    logprobs = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    options = GrpoOptions(clip_low=0.2, clip_high=0.28)
    loss, diagnostics = options.objective(logprobs, view([-1.0], [advantage]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-5)
    assert diagnostics["clip_fraction_high"].item() == (ratio == 1.5 and advantage > 0)
    assert diagnostics["clip_fraction_low"].item() == (ratio == 0.5 and advantage < 0)


def test_a_ratio_out_of_range_keeps_loss_and_gradient_finite():
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    loss, _ = GrpoOptions().objective(logprobs, view([-500.0, 0.0], [-1.0, 1.0]))
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logprobs.grad).all()


def test_token_weights_give_every_token_or_every_sequence_the_same_say():
    lengths = np.array([1, 3, 0])
    assert token_weights(lengths, "token").tolist() == [0.25, 0.25, 0.25]
    assert np.allclose(token_weights(lengths, "sequence"), [1 / 3, 1 / 9, 0])
    assert token_weights(np.array([0, 0]), "token").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("wrong", [{"clip_low": 1.0}, {"clip_high": -0.1}, {"average": "batch"}])
def test_an_option_out_of_range_is_named(wrong):
    with pytest.raises(RecipeError, match=f"`{next(iter(wrong))} = "):
        GrpoOptions(**wrong)
