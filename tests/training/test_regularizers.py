"""Terms beside the objective against their definitions, in float64, by sums over a whole vocabulary."""

import numpy as np
import pytest
import torch

from stretto.training.regularizers import MAX_DIVERGENCE_WEIGHT, divergence, imitation_weights, weighted_divergence

TOKENS = 7


def distribution(seed: int, spread: float = 1.0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(TOKENS, dtype=torch.float64, generator=draw)).log_softmax(0)


def policies() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits that are trained, a reference, and a behaviour policy whose ratios all lie below the cap."""
    logits = distribution(0, 0.3).requires_grad_()
    return logits, distribution(1), (logits.detach() + 0.2 * distribution(2)).log_softmax(0)


def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum()


def slope(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(value, logits)
    return gradient


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_mean_over_stale_tokens_has_the_gradient_that_is_documented(estimator: str) -> None:
    logits, reference, behaviour = policies()
    logs = logits.log_softmax(0)
    assert float((logs.detach() - behaviour).exp().max()) < MAX_DIVERGENCE_WEIGHT
    term = (behaviour.exp() * weighted_divergence(estimator, logs, reference, behaviour)).sum()
    expected = {
        "k1": torch.zeros_like(logits),
        "k2": slope(kl(logits.log_softmax(0), reference), logits),
        "k3": slope(kl(reference, logits.log_softmax(0)), logits),
    }
    torch.testing.assert_close(slope(term, logits), expected[estimator], rtol=1e-10, atol=1e-12)
    unweighted = (behaviour.exp() * divergence(estimator, logits.log_softmax(0), reference)).sum()
    assert (slope(unweighted, logits) - expected[estimator]).abs().max() > 1e-3, "stale tokens alone are biased"


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_over_stale_tokens_is_the_divergence_of_the_policy_that_trains(estimator: str) -> None:
    logits, reference, behaviour = policies()
    logs = logits.detach().log_softmax(0)
    mean = (behaviour.exp() * weighted_divergence(estimator, logs, reference, behaviour)).sum()
    torch.testing.assert_close(mean, kl(logs, reference), rtol=1e-10, atol=0.0)


def test_a_weight_is_capped_and_has_no_gradient() -> None:
    logits, reference, _ = policies()
    logs = logits.log_softmax(0)
    term = weighted_divergence("k2", logs, reference, logs.detach() - 5.0)
    torch.testing.assert_close(term, MAX_DIVERGENCE_WEIGHT * divergence("k2", logs, reference))
    free = logs.detach().requires_grad_()
    old = free.detach() + 0.3
    weighted_divergence("k2", free, reference, old).sum().backward()
    torch.testing.assert_close(free.grad, np.exp(-0.3) * (free.detach() - reference))


def test_far_from_the_reference_every_estimate_is_finite() -> None:
    far = torch.tensor([-900.0, 0.0, 900.0], dtype=torch.float64, requires_grad=True)
    for estimator in ("k1", "k2", "k3"):
        value = weighted_divergence(estimator, far, torch.zeros(3, dtype=torch.float64), far.detach() - 900.0)
        assert torch.isfinite(value).all()
        assert torch.isfinite(slope(value.sum(), far)).all()


def test_an_unknown_estimator_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"`estimator = 'k4'` is unknown"):
        divergence("k4", torch.zeros(1), torch.zeros(1))


def test_imitated_tokens_weigh_alike_and_the_others_nothing() -> None:
    weights = imitation_weights(np.array([1.0, 0.0, 2.0]), np.array([3, 5, 7]), 0.5)
    assert weights.tolist() == pytest.approx([0.1, 0.0, 0.1])
    assert not imitation_weights(np.zeros(2), np.array([3, 5]), 0.5).any()
