"""The formulas, a token at a time in Python's own floats: a loss and its derivative, for `sum(share * loss)`.

Written from the formulas alone. It shares nothing with the package but the names of options and their defaults.
"""

from math import exp, fsum


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
        self.anchor = data.proximal if getattr(options, "anchor", None) == "proximal" else data.behaviour

    def r(self, t):
        return exp(self.data.current[t] - self.anchor[t])

    def w(self, t):
        return exp(self.data.proximal[t] - self.data.behaviour[t])

    def tokenwise(self, function):
        """`function(t)` is the value to maximize at a token and its derivative by that token's log-probability."""
        both = [function(t) for t in range(self.count)]
        return [-value for value, _ in both], [
            -share * slope for share, (_, slope) in zip(self.shares, both, strict=True)
        ]

    def clip_form(self, r, slope_of_r, a):
        """The clipped surrogate at ratio `r`, and its derivative."""
        bounded = min(max(r, 1 - self.o.clip_low), 1 + self.o.clip_high)
        value, slope = (r * a, slope_of_r * a) if r * a <= bounded * a else (bounded * a, 0.0)
        if self.o.dual_clip is not None and a < 0 and value < self.o.dual_clip * a:
            value, slope = self.o.dual_clip * a, 0.0
        return value, slope

    def log_form(self, weight, t):
        """`sg(weight) A log pi`."""
        a = self.data.advantages[t]
        return weight * a * self.data.current[t], weight * a

    # -- the objectives ------------------------------------------------------------------------------------------------

    def grpo(self):
        return self.tokenwise(lambda t: self.clip_form(self.r(t), self.r(t), self.data.advantages[t]))

    dapo = dr_grpo = ppo = reinforce_plus_plus = grpo

    def reinforce(self):
        def weight(t):
            ratio = self.r(t)
            if self.o.level == "sequence":
                members = self.members[self.sequence_of[t]]
                ratio = exp(fsum(self.data.current[i] - self.anchor[i] for i in members))
            return ratio if self.o.cap is None else min(ratio, self.o.cap)

        return self.tokenwise(lambda t: self.log_form(weight(t), t))

    rloo = reinforce

    def gspo(self):
        """One term a sequence; its derivative is spread over all its tokens, since its ratio is."""
        losses, slopes = [0.0] * self.count, [0.0] * self.count
        for members in self.members:
            s = exp(fsum(self.data.current[t] - self.anchor[t] for t in members) / len(members))
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
        def at(t):
            if self.data.rewards[t] > self.o.threshold:
                return self.log_form(self.o.positive_weight, t)
            return self.log_form(self.o.negative_weight * min(self.r(t), self.o.cap), t)

        return self.tokenwise(at)

    def decoupled_ppo(self):
        def at(t):
            weight = min(self.w(t), self.o.weight_cap)
            value, slope = self.clip_form(self.r(t), self.r(t), self.data.advantages[t])
            return weight * value, weight * slope

        return self.tokenwise(at)

    def dora(self):
        return self.decoupled_ppo() if self.o.anchor == "proximal" else self.grpo()

    def kimi(self):
        def at(t):
            distance = self.data.current[t] - self.anchor[t]
            value, slope = self.log_form(1.0, t)
            return value - self.o.tau / 2 * distance**2, slope - self.o.tau * distance

        return self.tokenwise(at)

    def hispo(self):
        def at(t):
            members = self.members[self.sequence_of[t]]
            product = 1.0
            for i in members:
                product *= self.w(i)
            near = abs(product ** (1 / len(members)) - 1) < self.o.sequence_bound
            if not (near and abs(self.w(t) - 1) < self.o.token_bound):
                return 0.0, 0.0
            r = self.w(t) * exp(self.data.current[t] - self.data.proximal[t])
            return self.clip_form(r, r, self.data.advantages[t])

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
