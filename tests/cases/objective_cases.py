"""Random tokens, option sets that use every option of every objective, and functions for `type = "custom"`."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from stretto.objectives import OBJECTIVES
from stretto.objectives.base import Tokens

VARIANTS = {
    "grpo": [
        {},
        {"anchor": "proximal"},
        {"anchor": "sampled"},
        {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.3},
        {"dual_clip": 3.0, "average": "sequence"},
        {"average": "constant", "average_tokens": 7},
    ],
    "dapo": [{}, {"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.2, "anchor": "proximal"}],
    "dr-grpo": [
        {"average_tokens": 12},
        {"average_tokens": 5, "anchor": "proximal"},
        {"average_tokens": 12, "clip_low": 0.3, "clip_high": 0.1, "dual_clip": 1.5},
    ],
    "reinforce": [{}, {"level": "sequence"}, {"cap": 1.1, "anchor": "proximal"}, {"level": "sequence", "cap": 1.2}],
    "rloo": [{}, {"level": "token", "anchor": "proximal"}, {"cap": 5.0, "average": "sequence"}],
    "reinforce-plus-plus": [{}, {"anchor": "proximal"}, {"clip_low": 0.15, "clip_high": 0.35, "dual_clip": 1.4}],
    "gspo": [
        {},
        {"clip_low": 0.2, "clip_high": 0.3, "anchor": "proximal"},
        {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.2},
        {"average": "token", "clip_high": 0.5},
    ],
    "cispo": [
        {},
        {"clip_low": 0.2, "clip_high": 0.2, "anchor": "proximal"},
        {"clip_low": 0.1, "clip_high": 0.3, "mask": True},
    ],
    "tis": [{}, {"cap": 1.4, "anchor": "proximal"}],
    "topr": [
        {},
        {"positive_weight": 0.3, "negative_weight": 1.7, "cap": 1.3},
        {"threshold": 0.5, "anchor": "proximal"},
        {"level": "sequence", "cap": 1.2, "anchor": "sampled"},
    ],
    "decoupled-ppo": [{}, {"weight_cap": 1.1, "clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.2}],
    "kimi": [{}, {"tau": 1.5, "anchor": "proximal"}],
    "dora": [
        {"average_tokens": 9},
        {"average_tokens": 9, "weight_cap": 1.1, "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.2},
        {"average": "token", "anchor": "behaviour", "clip_low": 0.1},
        {"average_tokens": 9, "anchor": "proximal", "weight_cap": 1.2},
    ],
    "hispo": [
        {"average_tokens": 9},
        {"average": "token", "sequence_bound": 0.3, "token_bound": 0.25},
        {
            "average_tokens": 9,
            "sequence_bound": 5.0,
            "token_bound": 5.0,
            "clip_low": 0.1,
            "clip_high": 0.1,
            "dual_clip": 1.2,
        },
    ],
    "ppo": [{}, {"clip_low": 0.15, "clip_high": 0.35, "dual_clip": 1.4, "anchor": "proximal"}],
    "naive": [{}, {"average": "sequence"}],
    "distill": [{}],  # without a teacher: its loss is 0
    "custom": [
        {"function": "objective_cases:square", "options": {"scale": 2.0}},
        {"function": "objective_cases:square", "options": {"scale": 0.5}, "sampled": True},
    ],
}
CASES = [(name, options) for name, variants in VARIANTS.items() for options in variants]


def options_of(name, options):
    return OBJECTIVES[name](type=name, **options)


@dataclass
class Data:
    """Plain numbers: lists of a sequence's tokens, one after the other."""

    current: np.ndarray
    behaviour: np.ndarray
    proximal: np.ndarray
    sampled: np.ndarray
    advantages: np.ndarray
    rewards: np.ndarray
    lengths: list

    @property
    def owner(self):
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def tokens(self, dtype=torch.float64):
        def real(values):
            return torch.tensor(values, dtype=dtype)

        return Tokens(
            logprobs=real(self.current).requires_grad_(),
            behaviour=real(self.behaviour),
            proximal=real(self.proximal),
            advantages=real(self.advantages),
            rewards=real(self.rewards),
            sequences=torch.tensor(self.owner),
            num_sequences=len(self.lengths),
            lengths=torch.tensor(self.lengths),
            sampled=real(self.sampled),
        )

    def of_sequences(self, order):
        """The same data with only these sequences, in this order."""
        ends = np.cumsum(self.lengths)
        chosen = np.concatenate([np.arange(ends[i] - self.lengths[i], ends[i]) for i in order])
        parts = (self.current, self.behaviour, self.proximal, self.sampled, self.advantages, self.rewards)
        return Data(*(part[chosen] for part in parts), [self.lengths[i] for i in order]), chosen


def random_data(seed, *, spread=0.4, sequences=6, by_token=False):
    """Sequences of different lengths with ratios around 1; with `by_token` advantages differ inside a sequence."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=sequences).tolist()
    count = sum(lengths)
    current = -rng.exponential(1.0, count)
    advantages = rng.normal(size=count if by_token else sequences)
    rewards = rng.choice([-1.0, 0.0, 0.4, 1.0], size=sequences)
    behaviour, proximal = (current + spread * rng.normal(size=count) for _ in range(2))
    return Data(
        current,
        behaviour,
        proximal,
        behaviour + 0.5 * spread * rng.normal(size=count),
        advantages if by_token else np.repeat(advantages, lengths),
        np.repeat(rewards, lengths),
        lengths,
    )


def on_policy(data):
    """The same data, sampled from the current policy."""
    return Data(*[data.current] * 4, data.advantages, data.rewards, data.lengths)


def gradient(options, data, shares):
    """Losses, diagnostics and the gradient of `sum(share * loss)` by the current log-probabilities."""
    tokens = data.tokens()
    losses, diagnostics = options.loss(tokens)
    torch.dot(losses, torch.as_tensor(shares)).backward()
    return losses.detach().numpy(), diagnostics, tokens.logprobs.grad.numpy()


# -- functions for `type = "custom"` -----------------------------------------------------------------------------------


def square(tokens, options):
    difference = tokens.logprobs - tokens.behaviour
    return options["scale"] * difference.square() - tokens.advantages * tokens.logprobs, {"distance": difference}


def stale_ratio(tokens, options):
    return -(tokens.logprobs - tokens.sampled).exp() * tokens.advantages, {}


def exiting(tokens, options):
    raise SystemExit(0)


def too_few(tokens):
    return tokens.logprobs, {}


def one_number(tokens, options):
    return tokens.logprobs.sum(), {}


def loss_alone(tokens, options):
    return tokens.logprobs


def two_tensors(tokens, options):
    return tokens.logprobs, tokens.logprobs


def long_diagnostic(tokens, options):
    return tokens.logprobs, {"scale": math.pi}


def raising(tokens, options):
    return -tokens.logprobs * options["factor"], {}


def raising_in_torch(tokens, options):
    return torch.einsum("ab,bc->ac", tokens.logprobs, tokens.logprobs), {}


def detached(tokens, options):
    return -tokens.advantages * tokens.logprobs.detach(), {}


def of_another_leaf(tokens, options):
    return torch.zeros_like(tokens.logprobs).requires_grad_(), {}


def doubled(tokens, options):
    return -tokens.logprobs.double(), {}


def not_a_number(tokens, options):
    return -tokens.logprobs * (tokens.logprobs - tokens.logprobs.detach()).detach().log() * 0.0, {}


def steep(tokens, options):
    """Its loss is finite; its gradient is not: that of the root at 0."""
    return (tokens.logprobs - tokens.logprobs.detach()).abs().sqrt(), {}


def in_place(tokens, options):
    losses = tokens.logprobs.exp()
    losses.mul_(2.0)
    return losses, {}


def numbered(tokens, options):
    return -tokens.logprobs, {1: tokens.advantages}


def drawing(tokens, options):
    return -tokens.logprobs * torch.rand(tokens.logprobs.shape, dtype=tokens.logprobs.dtype), {}


NUMBER = 3
