"""The divergence over whole distributions: against a reference in Python's own floats, written from the equations."""

from math import exp, fsum, log, tanh

import pytest
import torch

from stretto.training.distribution_divergence import HeadDistributions, distribution_divergence
from stretto.training.logit_kernels import LogitScale

TOKENS, CHOSEN, WIDTH, WIDTH_OF_TEACHER = 9, [0, 2, 3, 7, 8], 6, 4


def models(vocabulary=13, of_teacher=17, seed=0):
    """Hidden states, head and bias of a policy, and those of a teacher with another width and another padding."""
    torch.manual_seed(seed)
    real = {"dtype": torch.float64}
    policy = [
        torch.randn(TOKENS, WIDTH, **real),
        torch.randn(vocabulary, WIDTH, **real),
        torch.randn(vocabulary, **real),
    ]
    teacher = [
        torch.randn(len(CHOSEN), WIDTH_OF_TEACHER, **real),
        torch.randn(of_teacher, WIDTH_OF_TEACHER, **real),
        torch.randn(of_teacher, **real),
    ]
    return policy, teacher


def scaled(value, scale):
    value *= scale.multiplier
    if scale.softcap is not None:
        value = scale.softcap * tanh(value / scale.softcap)
    return value / scale.temperature


def logprobs_of(state, weight, bias, scale, shared):
    """The log-probabilities of the shared tokens, a number at a time."""
    logits = [
        scaled(fsum(float(x) * float(w) for x, w in zip(state, row, strict=True)) + float(b), scale)
        for row, b in zip(weight[:shared], bias[:shared], strict=True)
    ]
    top = max(logits)
    normalizer = top + log(fsum(exp(each - top) for each in logits))
    return [each - normalizer for each in logits]


def reference(policy, teacher, scale, scale_of_teacher, shared, top_k=None):
    """The divergence of each chosen token, from `sum p (log p - log q)`, over all tokens or over the likeliest + 1."""
    found = []
    for place, row in enumerate(CHOSEN):
        own = logprobs_of(policy[0][row], policy[1], policy[2], scale, shared)
        other = logprobs_of(teacher[0][place], teacher[1], teacher[2], scale_of_teacher, shared)
        if top_k is not None:
            likeliest = sorted(range(shared), key=lambda token: -other[token])[:top_k]
            own, other = (
                [each[token] for token in likeliest]
                + [log(fsum(exp(each[token]) for token in range(shared) if token not in likeliest))]
                for each in (own, other)
            )
        found.append(fsum(exp(p) * (p - q) for p, q in zip(own, other, strict=True)))
    return found


SCALES = [LogitScale(), LogitScale(0.7), LogitScale(1.3, softcap=2.0, multiplier=0.5)]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("top_k", [None, 1, 4])
@pytest.mark.parametrize("trained_head", [False, True])
def test_value_and_gradient_are_those_of_the_equations(scale, top_k, trained_head):
    policy, teacher = models()
    shared, predicts = 11, torch.tensor(CHOSEN)
    made = HeadDistributions(*teacher, LogitScale(scale.temperature), shared)
    distributions = made if top_k is None else made.likeliest(top_k, chunk_tokens=2)
    leaves = [each.clone().requires_grad_(trained_head or place == 0) for place, each in enumerate(policy)]
    got, agreement = distribution_divergence(
        leaves[0], leaves[1], predicts, distributions, shared, bias=leaves[2], scale=scale, chunk_tokens=2
    )
    expected = reference(policy, teacher, scale, LogitScale(scale.temperature), shared, top_k)
    torch.testing.assert_close(got.detach(), torch.tensor(expected, dtype=torch.float64))
    assert bool((got >= 0).all())
    assert set(agreement.tolist()) <= {0.0, 1.0}
    factors = torch.linspace(-1.0, 2.0, len(CHOSEN), dtype=torch.float64)
    torch.dot(got, factors).backward()
    step = 1e-5
    for leaf, values in zip(leaves, policy, strict=True):
        if leaf.grad is None:
            continue
        flat = values.view(-1)
        for place in range(0, len(flat), 7):
            kept, sides = float(flat[place]), []
            for sign in (1, -1):
                flat[place] = kept + sign * step
                moved = reference(policy, teacher, scale, LogitScale(scale.temperature), shared, top_k)
                sides.append(fsum(f * m for f, m in zip(factors.tolist(), moved, strict=True)))
            flat[place] = kept
            assert float(leaf.grad.view(-1)[place]) == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=2e-7)


def test_chunks_change_nothing_and_rows_that_predict_nothing_have_no_gradient():
    policy, teacher = models()
    distributions = HeadDistributions(*teacher, LogitScale(), 13)
    results = []
    for chunk in (1, 2, 100):
        hidden = policy[0].clone().requires_grad_()
        got, _ = distribution_divergence(
            hidden, policy[1], torch.tensor(CHOSEN), distributions, 13, bias=policy[2], chunk_tokens=chunk
        )
        got.sum().backward()
        results.append((got.detach(), hidden.grad))
    for got, grad in results[1:]:
        torch.testing.assert_close(got, results[0][0])
        torch.testing.assert_close(grad, results[0][1])
    others = [row for row in range(TOKENS) if row not in CHOSEN]
    assert not results[0][1][others].any()


def test_a_teacher_with_the_policys_own_distribution_has_divergence_0_and_agrees():
    policy, _ = models()
    own = HeadDistributions(policy[0][CHOSEN], policy[1], policy[2], LogitScale(0.8), 13)
    for distributions in (own, own.likeliest(3), own.likeliest(13)):
        hidden = policy[0].clone().requires_grad_()
        got, agreement = distribution_divergence(
            hidden, policy[1], torch.tensor(CHOSEN), distributions, 13, bias=policy[2], scale=LogitScale(0.8)
        )
        got.sum().backward()
        assert agreement.tolist() == [1.0] * len(CHOSEN)
        torch.testing.assert_close(got.detach(), torch.zeros_like(got.detach()), atol=1e-12, rtol=0)
        torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden.grad), atol=1e-12, rtol=0)


def test_the_likeliest_tokens_never_diverge_more_than_all_and_all_of_them_as_much():
    policy, teacher = models()
    made, predicts = HeadDistributions(*teacher, LogitScale(), 13), torch.tensor(CHOSEN)
    whole, *parts = (
        distribution_divergence(policy[0], policy[1], predicts, each, 13, bias=policy[2])[0]
        for each in (made, *(made.likeliest(count) for count in (1, 3, 6, 13)))
    )
    for fewer, more in zip(parts, [*parts[1:], whole], strict=True):
        assert bool((fewer <= more + 1e-12).all())
    torch.testing.assert_close(parts[-1], whole)


@pytest.mark.parametrize("trained_head", [False, True])
def test_half_precision_is_reduced_in_float32(trained_head):
    policy, teacher = models(vocabulary=300, of_teacher=320)
    predicts, results = torch.tensor(CHOSEN), []
    for dtype in (torch.float64, torch.bfloat16):
        hidden, weight = (each.to(torch.bfloat16).to(dtype).requires_grad_(kept) for each, kept in
                          ((policy[0], True), (policy[1], trained_head)))  # fmt: skip
        states, head = (each.to(torch.bfloat16).to(dtype) for each in teacher[:2])
        got, _ = distribution_divergence(
            hidden, weight, predicts, HeadDistributions(states, head, None, LogitScale(), 300), 300
        )
        got.sum().backward()
        results.append((got, hidden.grad))
    assert results[1][0].dtype == torch.float32
    torch.testing.assert_close(results[1][0].double(), results[0][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(results[1][1].double(), results[0][1], atol=0.05, rtol=0.03)


def test_no_token_is_no_divergence():
    policy, teacher = models()
    empty = torch.zeros(0, dtype=torch.int64)
    none = HeadDistributions(teacher[0][:0], teacher[1], teacher[2], LogitScale(), 13)
    for distributions in (none, none.likeliest(2)):
        got, agreement = distribution_divergence(policy[0], policy[1], empty, distributions, 13, bias=policy[2])
        assert len(got) == len(agreement) == 0
