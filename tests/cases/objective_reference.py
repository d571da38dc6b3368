"""The formulas, a token at a time in Python's own floats: a loss and its derivative, for `sum(share * loss)`.

Written from the formulas alone. It shares nothing with the package but the names of options and their defaults.
"""

from math import exp, fsum

LARGEST_LOG = 20.0  # ratios and weights stop at its exponential, and at that of its negative


def bounded(log):
    """The exponential of a logarithm that is clamped."""
    return exp(max(-LARGEST_LOG, min(LARGEST_LOG, log)))


def slope_of_bounded(log):
    """Its derivative: beyond the bound it is constant."""
    return bounded(log) if abs(log) <= LARGEST_LOG else 0.0


class Reference:
    def __init__(self, options, data, shares):
        self.o = options
        self.data = data
        self.shares = shares
        self.count = len(data.current)
        self.members = []  # of each sequence
        start = 0
        for length in data.lengths:
            self.members.append(range(start, start + length))
            start += length
        self.sequence_of = [i for i, members in enumerate(self.members) for _ in members]
        anchors = {"behaviour": data.behaviour, "sampled": data.sampled, "proximal": data.proximal}
        self.anchor = anchors[getattr(options, "anchor", "behaviour")]

    def log_ratio(self, t):
        return self.data.current[t] - self.anchor[t]

    def r(self, t):
        """The current policy over the anchor."""
        return bounded(self.log_ratio(t))

    def slope_of_r(self, t):
        """Its derivative by the current log-probability."""
        return slope_of_bounded(self.log_ratio(t))

    def w(self, t):
        """The policy at the start of the update over the engine's record."""
        return bounded(self.data.proximal[t] - self.data.behaviour[t])

    def log_discrepancy(self, t):
        """The trainer against the engine, under the version that sampled."""
        return self.data.sampled[t] - self.data.behaviour[t]

    def sequence(self, t):
        """The tokens of the token's sequence."""
        return self.members[self.sequence_of[t]]

    def tokenwise(self, function):
        """`function(t)` is the value to maximize at a token and its derivative by that token's log-probability."""
        both = [function(t) for t in range(self.count)]
        return [-value for value, _ in both], [
            -share * slope for share, (_, slope) in zip(self.shares, both, strict=True)
        ]

    def clip_form(self, r, slope_of_r, a):
        """The clipped surrogate at ratio `r`, and its derivative."""
        clipped = min(max(r, 1 - self.o.clip_low), 1 + self.o.clip_high)
        value, slope = (r * a, slope_of_r * a) if r * a <= clipped * a else (clipped * a, 0.0)
        if self.o.dual_clip is not None and a < 0 and value < self.o.dual_clip * a:
            value, slope = self.o.dual_clip * a, 0.0
        return value, slope

    def log_form(self, weight, t):
        """`sg(weight) A log pi`."""
        a = self.data.advantages[t]
        return weight * a * self.data.current[t], weight * a

    # -- the objectives ------------------------------------------------------------------------------------------------

    def grpo(self):
        return self.tokenwise(lambda t: self.clip_form(self.r(t), self.slope_of_r(t), self.data.advantages[t]))

    dapo = dr_grpo = ppo = reinforce_plus_plus = grpo

    def reinforce(self):
        def weight(t):
            ratio = self.r(t)
            if self.o.level == "sequence":
                ratio = bounded(fsum(self.log_ratio(i) for i in self.sequence(t)))
            return ratio if self.o.cap is None else min(ratio, self.o.cap)

        return self.tokenwise(lambda t: self.log_form(weight(t), t))

    rloo = reinforce

    def distill(self):
        """Nothing but what teachers add."""
        return self.tokenwise(lambda t: (0.0, 0.0))

    def gspo(self):
        """One term a sequence; its derivative is spread over all its tokens, since its ratio is."""
        losses, slopes = [0.0] * self.count, [0.0] * self.count
        for members in self.members:
            s = bounded(fsum(self.log_ratio(t) for t in members) / len(members))
            value, slope = self.clip_form(s, s / len(members), self.data.advantages[members[0]])
            for t in members:
                losses[t] = -value
                for other in members:
                    slopes[other] -= self.shares[t] * slope
        return losses, slopes

    def cispo(self):
        def at(t):
            r, a = self.r(t), self.data.advantages[t]
            low, high = 1 - self.o.clip_low, 1 + self.o.clip_high
            if self.o.mask and ((a > 0 and r > high) or (a < 0 and r < low)):
                return 0.0, 0.0
            return self.log_form(min(max(r, low), high), t)

        return self.tokenwise(at)

    def tis(self):
        return self.tokenwise(lambda t: self.log_form(min(self.r(t), self.o.cap), t))

    def topr(self):
        """Good answers count in full, bad ones by a ratio: of the token, or the product over the whole answer."""

        def at(t):
            if self.data.rewards[t] > self.o.threshold:
                return self.log_form(self.o.positive_weight, t)
            tokens = self.sequence(t) if self.o.level == "sequence" else [t]
            ratio = bounded(fsum(self.log_ratio(i) for i in tokens))
            return self.log_form(self.o.negative_weight * max(0.0, min(ratio, self.o.cap)), t)

        return self.tokenwise(at)

    def decoupled_ppo(self):
        def at(t):
            weight = min(self.w(t), self.o.weight_cap)
            value, slope = self.clip_form(self.r(t), self.slope_of_r(t), self.data.advantages[t])
            return weight * value, weight * slope

        return self.tokenwise(at)

    def dora(self):
        """`sg(min(b / mu, weight_cap))` times the clip form of `pi / b`; `b` is the anchor, and `mu` has no weight."""

        def at(t):
            value, slope = self.clip_form(self.r(t), self.slope_of_r(t), self.data.advantages[t])
            if self.o.anchor == "behaviour":
                return value, slope
            weight = min(bounded(self.anchor[t] - self.data.behaviour[t]), self.o.weight_cap)
            return weight * value, weight * slope

        return self.tokenwise(at)

    def kimi(self):
        def at(t):
            distance = self.log_ratio(t)
            value, slope = self.log_form(1.0, t)
            return value - self.o.tau / 2 * distance**2, slope - self.o.tau * distance

        return self.tokenwise(at)

    def hispo(self):
        """A token is out if its own discrepancy or the geometric mean over its sequence is too far from 1. The others
        have the discrepancy as a constant weight of the clip form of `pi / pi_w`."""

        def at(t):
            members = self.sequence(t)
            own = bounded(self.log_discrepancy(t))
            mean = bounded(fsum(self.log_discrepancy(i) for i in members) / len(members))
            if abs(mean - 1) >= self.o.sequence_bound or abs(own - 1) >= self.o.token_bound:
                return 0.0, 0.0
            log = self.data.current[t] - self.data.sampled[t]
            value, slope = self.clip_form(bounded(log), slope_of_bounded(log), self.data.advantages[t])
            return own * value, own * slope

        return self.tokenwise(at)

    def naive(self):
        return self.tokenwise(lambda t: self.log_form(1.0, t))

    def custom(self):
        def at(t):
            distance = self.data.current[t] - self.data.behaviour[t]
            value, slope = self.log_form(1.0, t)
            scale = self.o.options["scale"]
            return value - scale * distance**2, slope - 2 * scale * distance

        return self.tokenwise(at)


def reference(options, data, shares):
    """Losses and derivatives, as lists."""
    return getattr(Reference(options, data, shares), options.type.replace("-", "_"))()
