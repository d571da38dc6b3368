"""Warns when a run cannot learn, with what to try. Pure: metrics of updates in, sentences out.

| kind                  | holds if, in `HOLDS` updates in a row                                                     |
|-----------------------|-------------------------------------------------------------------------------------------|
| `reward-constant`     | every completion of the batch has the same reward                                         |
| `no-signal`           | the rewards of every group are equal, though they differ between groups                   |
| `little-signal`       | at least `LITTLE` of the groups have equal rewards, trained and filtered ones together    |
| `truncated`           | at least `TRUNCATED` of the completions are cut off by `rollout.max_tokens`               |
| `entropy-gone`        | the entropy is below `ENTROPY_GONE`                                                       |
| `gradient-zero`       | the gradient is 0 although the rewards have a signal                                      |
| `gradient-not-finite` | the gradient is not finite; only with float16, otherwise the run ends with an error       |
| `mismatch-large`      | engine and trainer diverge by at least `MISMATCH_LARGE` a token under the same version    |
| `failing`             | at least `FAILING` of the trajectories failed                                             |
| `solved`              | one of the first three, while the reward is learnt                                        |

`reward_trend.py` says if the reward rises or is learnt. While it does, the kinds of `EXCUSED` are no symptoms: a run
that learns may cut off every completion. Those of `PATIENT` also wait until the trend is known. Signal that is missing
because the task is learnt is `solved`, which is said once, and whose end is not.

If most completions are cut off, the sentences of the first three begin with that, and advise to raise
`rollout.max_tokens`: a completion that did not come to its answer says nothing about the prompts.

With several rewards, the sentence of the first three names the rewards that are equal for all completions. A task is
not learnt while one of them is *stuck*: it never was above 0, or it is below what it once was. Then there is no
`solved`.

Each kind is reported once when it begins, and once when it is over: after `HOLDS` updates in a row without it. It is
not reported again in the same run. `collapse.py` compares a run with its own past; the bounds here are absolute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.observe.reward_trend import Outlook

HOLDS = 3  # updates in a row: one bad batch is no symptom
LITTLE = 0.9  # share of groups
FEWEST_GROUPS = 8  # of an update, for a share of groups to mean anything
TRUNCATED = 0.95  # share of completions
MOSTLY_TRUNCATED = 0.5  # share of completions, beyond which missing signal is first put down to it
ENTROPY_GONE = 1e-3  # nats a token; a policy that has learnt a small task well still has 20 times as much
MISMATCH_LARGE = 0.05  # a token; ratios are then off by about 30 %, beyond the usual clip of 20 %
FAILING = 0.5  # share of trajectories
LOWER = 0.1  # share of the range of a reward's means, by which a constant one is clearly below its highest

# A kind that says more than another: while it holds, the other is not reported.
IMPLIES = {"reward-constant": ("no-signal", "little-signal", "gradient-zero"), "no-signal": ("little-signal",)}

OF_SIGNAL = ("reward-constant", "no-signal", "little-signal")  # kinds of missing signal

# Kinds that are no symptom while the reward rises or is learnt, and those that wait until its trend is known.
EXCUSED = (*OF_SIGNAL, "truncated", "entropy-gone")
PATIENT = ("little-signal", "truncated", "entropy-gone")

# Each kind that may end, with what is said then.
OVER = {
    "reward-constant": "rewards differ again",
    "no-signal": "some groups have different rewards again",
    "little-signal": "more groups have different rewards again",
    "truncated": "completions end by themselves again",
    "entropy-gone": "the policy explores again",
    "gradient-zero": "the gradient is not 0 any more",
    "gradient-not-finite": "the gradient is finite again",
    "mismatch-large": "engine and trainer agree again",
    "failing": "most trajectories succeed again",
}

KINDS = (*OVER, "solved")

Line = Mapping[str, Any]


@dataclass(slots=True)
class Symptoms:
    """The symptoms of a run so far, of bounded size."""

    run: str = "RUN"  # the run's folder, as the sentences name it
    since: dict[str, int] = field(default_factory=dict)  # kind -> the update at which it was reported
    over: dict[str, int] = field(default_factory=dict)  # kind -> the update at which its end was reported
    _held: dict[str, int] = field(default_factory=dict)  # kind -> updates in a row
    _absent: dict[str, int] = field(default_factory=dict)  # kind -> updates in a row without it
    _parts: _Parts = field(default_factory=lambda: _Parts())

    def add(self, line: Line, outlook: Outlook = "flat") -> tuple[list[str], list[str]]:
        """Adds the line of an update. Returns the kinds that hold now, and sentences for those that began or ended."""
        update = int(line["update"])
        self._parts.add(line)
        stuck = self._parts.stuck()
        if outlook == "learnt" and stuck:
            outlook = "flat"
        found = dict(_found(line, self._parts.described(), stuck, self.run))
        if outlook == "learnt" and ("no-signal" in found or "little-signal" in found):
            found["solved"] = _solved(line, self.run)
        excused = EXCUSED if outlook in ("rising", "learnt") else PATIENT if outlook == "unknown" else ()
        for kind in KINDS:
            self._held[kind] = self._held.get(kind, 0) + 1 if kind in found and kind not in excused else 0
            self._absent[kind] = 0 if kind in found else self._absent.get(kind, 0) + 1
        holding = [kind for kind in found if self._held[kind] >= HOLDS]
        implied = {other for kind in holding for other in IMPLIES.get(kind, ())}
        sentences = []
        for kind in holding:
            if kind not in self.since and kind not in implied:
                self.since[kind] = update
                what = "the prompts may be too easy" if kind == "solved" else "the run may not be learning"
                sentences.append(f"update {update}: {what}: {found[kind]}")
        for kind in self.since:
            if kind in OVER and kind not in self.over and self._absent[kind] >= HOLDS:
                self.over[kind] = update
                sentences.append(f"update {update}: {OVER[kind]} (the warning of update {self.since[kind]} is over)")
        return [kind for kind in holding if kind not in implied], sentences


@dataclass(slots=True)
class _Parts:
    """The rewards of a task that has several: which of them have been equal for all completions, and their means."""

    _constant: dict[str, tuple[float, int]] = field(default_factory=dict)  # name -> value, updates in a row
    _means: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> lowest and highest so far

    def add(self, line: Line) -> None:
        """Adds the line of an update."""
        found = line.get("constant_rewards", {})
        before = self._constant
        self._constant = {
            name: (value, before[name][1] + 1 if name in before and before[name][0] == value else 1)
            for name, value in found.items()
        }
        for key, mean in line.items():
            if key.startswith("reward/"):
                low, high = self._means.get(key[7:], (mean, mean))
                self._means[key[7:]] = (min(low, mean), max(high, mean))

    def _lasting(self) -> dict[str, float]:
        return {name: value for name, (value, updates) in self._constant.items() if updates >= HOLDS}

    def stuck(self) -> list[str]:
        """Returns the rewards that are constant and not at their top."""
        return [name for name, value in self._lasting().items() if self._is_stuck(name, value)]

    def _is_stuck(self, name: str, value: float) -> bool:
        low, high = self._means.get(name, (value, value))
        return value <= 0 if low == high else value < high - LOWER * (high - low)

    def described(self) -> str:
        """Returns a clause that names the constant rewards, the stuck ones first; empty if there is none."""
        lasting = self._lasting()
        names = sorted(lasting, key=lambda name: not self._is_stuck(name, lasting[name]))
        return " and ".join(f"`{name}` is {lasting[name]:.3g}" for name in names)


def is_without_signal(metrics: Line) -> bool:
    """True if no group of an update had two different rewards, so that nothing could be learnt from them."""
    return bool(0 < metrics.get("groups", 0) == metrics.get("groups_without_signal", 0))


def _found(line: Line, constant: str, stuck: Sequence[str], run: str) -> Iterator[tuple[str, str]]:
    """Returns the symptoms of one update, each with words for it. A number that was not measured is no symptom.

    `constant` names the rewards that are equal for all completions, `stuck` those of them that are not at their top.
    `run` is the folder of the run.
    """
    yield from _signal(line, constant, stuck, run)
    if line.get("truncated", 0.0) >= TRUNCATED:
        yield (
            "truncated",
            f"{_cut_off(line)}; raise it, ask for shorter answers, or see if the model ever ends one (`rollout.stop`, "
            "its chat template)",
        )
    if line.get("entropy", math.inf) < ENTROPY_GONE:
        yield (
            "entropy-gone",
            f"entropy is {line['entropy']:.1e}: the policy gives the same completion to a prompt again and again, and "
            "tries nothing new; start again with a lower `training.learning_rate`, or with `[algorithm.entropy]`, or "
            "raise `rollout.temperature`",
        )
    norm = line.get("grad_norm")
    if norm is not None and not math.isfinite(norm):
        yield (
            "gradient-not-finite",
            "the gradient does not fit into float16, so updates change nothing; set "
            '`model.dtype = "bfloat16"` or "float32"',
        )
    elif norm == 0 and not is_without_signal(line):
        yield (
            "gradient-zero",
            f"the gradient is 0 though rewards differ: {line.get('share_without_gradient', 1.0):.0%} of the tokens are "
            "clipped, masked or left out; widen `algorithm.clip_low` and `clip_high`, lower `rollout.staleness`, or "
            "look at what masks them (`mask_truncated`, `[algorithm.correction]`)",
        )
    if line.get("mismatch_kl", 0.0) >= MISMATCH_LARGE and line.get("mismatch_tokens", 1):
        yield (
            "mismatch-large",
            f"engine and trainer diverge by {line['mismatch_kl']:.2g} a token under the same version, so that every "
            'ratio is wrong; set `model.dtype = "float32"`, or bound the weights with `[algorithm.correction]`',
        )
    failed, trained = line.get("failed", 0), line.get("num_sequences", 0) - line.get("replayed_sequences", 0)
    if failed and failed >= FAILING * (failed + trained):
        yield (
            "failing",
            f"{failed:.0f} trajectories failed for {trained:.0f} that were trained; `stretto show {run}` has the "
            "reasons",
        )


def _cut_off(line: Line) -> str:
    """Returns a clause on the completions of an update that were cut off."""
    return (
        f"`rollout.max_tokens` cut off {line['truncated']:.0%} of the completions (mean length "
        f"{line.get('length_mean', 0):.0f}), which are rewarded before they have answered"
    )


def _signal(line: Line, constant: str, stuck: Sequence[str], run: str) -> Iterator[tuple[str, str]]:
    """Returns the symptoms of missing signal, each with words for it."""
    look = _look(line, run)
    for kind, fact, advice in _missing_signal(line, constant, stuck, look):
        if line.get("truncated", 0.0) < MOSTLY_TRUNCATED:
            yield kind, f"{fact}{advice}"
        else:
            yield (
                kind,
                f"{_cut_off(line)}; {fact}; {look}: if they are right, the task is solved; otherwise raise "
                "`rollout.max_tokens`, or ask for shorter answers",
            )


def _look(line: Line, run: str) -> str:
    return f"look at samples with `stretto show {run} --update {line['update']}`"


def _missing_signal(line: Line, constant: str, stuck: Sequence[str], look: str) -> Iterator[tuple[str, str, str]]:
    """Returns the symptoms of missing signal, each with the fact and an advice that continues its sentence."""
    reward = line.get("reward_mean", math.nan)
    parts = f" ({constant} in all of them)" if constant else ""
    if line.get("reward_std") == 0 and line.get("num_sequences", 0) > 1 and is_without_signal(line):
        yield (
            "reward-constant",
            f"every completion gets the reward {reward:.3g}{parts}",
            f"; {look}: if they are right, the task is solved; otherwise the reward does not see the answer, or no "
            "completion is ever right: start with easier prompts, or give credit for a part",
        )
    never = ", ".join(f"`{name}`" for name in stuck)
    advice = (
        f": {constant} in all completions of the last {HOLDS} updates or more; {look}: if they are right, {never} does "
        "not see the answer; otherwise no completion is ever right: start with easier prompts, or give credit for a "
        "part"
    )
    if is_without_signal(line):
        each = f"; {constant} in all completions" if constant and not stuck else ""
        yield (
            "no-signal",
            f"no reward trains anything: in every group all rewards are equal (mean {reward:.3g}{each})",
            advice
            if stuck
            else f", so that each prompt is too easy or too hard; {look}, choose other prompts, raise `rollout.group` "
            "or `rollout.temperature`, or let the reward tell better completions from worse ones",
        )
    groups, filtered = line.get("groups", 0), line.get("filtered_groups", 0)
    without = line.get("groups_without_signal", 0) + filtered
    if groups + filtered >= FEWEST_GROUPS and without >= LITTLE * (groups + filtered):
        yield (
            "little-signal",
            f"{without:.0f} of {groups + filtered:.0f} groups have equal rewards and train nothing (mean reward "
            f"{_reward_without(line):.3g})",
            advice
            if stuck
            else ": most prompts are too easy, or too hard; choose others, or draw those in between more often with "
            '`task.order = "pass-rate"`',
        )


def _solved(line: Line, run: str) -> str:
    groups = line.get("groups", 0) + line.get("filtered_groups", 0)
    without = line.get("groups_without_signal", 0) + line.get("filtered_groups", 0)
    return (
        f"{without:.0f} of {groups:.0f} groups have equal rewards (mean {_reward_without(line):.3g}), and the reward "
        f"is near the highest of the run; {_look(line, run)}: if they are right, the task is solved: stop here, or "
        "choose harder prompts; otherwise the reward sees no difference any more"
    )


def _reward_without(line: Line) -> float:
    """The mean reward of the filtered groups, else of the batch."""
    return float(line.get("filtered_reward", line.get("reward_mean", math.nan)))
