"""Signs of a collapse: a run that collapses has them, and one that learns has none."""

import io
import json
import random
from dataclasses import asdict

import pytest
from rich.console import Console

from stretto.observe.collapse import LEAST, PAST, RECENT, History
from stretto.observe.metrics import Tally
from stretto.observe.progress import Plain
from stretto.types import UpdateReport

# 100 updates of the quickstart under `multi-version` with K = 2: entropy falls while it learns.
REWARD_MEAN = (
    "0.34 0.49 0.45 0.59 0.53 0.67 0.57 0.64 0.86 0.66 0.72 0.78 0.82 0.84 0.86 0.82 0.74 0.87 0.88 0.80 0.87 "
    "0.95 0.88 0.85 0.81 0.95 0.91 0.91 0.83 0.86 0.89 0.89 0.91 0.89 0.96 0.94 0.95 0.88 0.93 0.93 0.95 0.88 "
    "0.94 0.82 0.84 0.87 0.98 0.94 0.91 0.90 0.97 0.93 0.91 0.84 0.94 0.91 0.91 0.89 0.95 0.92 0.89 0.92 0.91 "
    "0.97 0.92 0.95 0.91 0.84 0.85 0.95 0.95 0.91 0.94 0.92 0.94 0.93 0.96 0.95 0.93 0.98 0.91 0.93 0.89 0.94 "
    "0.90 0.94 0.96 0.93 0.91 0.98 0.91 0.91 0.95 0.96 0.95 0.93 0.84 0.96 0.91 0.98 "
)
REWARD_STD = (
    "0.47 0.50 0.50 0.49 0.50 0.47 0.50 0.48 0.35 0.47 0.45 0.41 0.38 0.36 0.35 0.38 0.44 0.34 0.32 0.40 0.34 "
    "0.21 0.32 0.36 0.39 0.21 0.28 0.28 0.38 0.35 0.31 0.31 0.28 0.31 0.19 0.24 0.21 0.32 0.26 0.26 0.21 0.32 "
    "0.24 0.38 0.37 0.34 0.15 0.24 0.28 0.30 0.17 0.26 0.28 0.36 0.24 0.28 0.29 0.31 0.23 0.27 0.31 0.27 0.29 "
    "0.17 0.27 0.23 0.29 0.37 0.36 0.23 0.21 0.28 0.24 0.27 0.24 0.26 0.19 0.23 0.26 0.15 0.28 0.26 0.31 0.24 "
    "0.30 0.24 0.19 0.26 0.28 0.12 0.28 0.28 0.21 0.19 0.21 0.26 0.36 0.19 0.28 0.15 "
)
ENTROPY = (
    "0.389 0.225 0.191 0.174 0.176 0.113 0.177 0.169 0.077 0.118 0.117 0.072 0.078 0.061 0.050 0.073 0.127 0.077 "
    "0.046 0.064 0.091 0.039 0.058 0.078 0.137 0.047 0.035 0.047 0.060 0.073 0.101 0.051 0.043 0.048 0.031 0.073 "
    "0.031 0.038 0.043 0.040 0.035 0.077 0.055 0.061 0.084 0.040 0.026 0.037 0.051 0.037 0.071 0.034 0.037 0.114 "
    "0.037 0.073 0.047 0.071 0.036 0.073 0.048 0.046 0.082 0.031 0.041 0.038 0.042 0.068 0.071 0.032 0.028 0.037 "
    "0.041 0.043 0.040 0.035 0.029 0.034 0.036 0.031 0.042 0.033 0.044 0.039 0.036 0.039 0.046 0.030 0.039 0.023 "
    "0.048 0.030 0.027 0.022 0.031 0.032 0.049 0.028 0.031 0.034 "
)
SAMPLE_SIZE = (
    "1.00 0.98 0.95 0.92 0.90 0.93 0.92 0.97 0.98 0.95 0.98 0.99 0.99 0.99 1.00 0.98 0.99 0.99 1.00 0.96 0.95 "
    "1.00 0.94 0.97 0.98 1.00 1.00 1.00 0.99 0.99 0.95 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 0.99 "
    "0.99 0.99 0.99 1.00 1.00 1.00 1.00 0.99 0.99 1.00 0.99 0.91 0.98 0.99 0.98 0.99 0.99 0.98 1.00 0.99 0.98 "
    "1.00 1.00 1.00 1.00 0.99 0.99 1.00 1.00 0.99 1.00 1.00 1.00 1.00 1.00 0.99 1.00 1.00 1.00 1.00 1.00 0.99 "
    "1.00 1.00 1.00 1.00 1.00 1.00 0.99 1.00 1.00 1.00 0.99 0.99 1.00 1.00 1.00 1.00 "
)


def numbers(text):
    return [float(word) for word in text.split()]


def quickstart():
    """Its lines; the mismatch is measured at the few updates that have data of the trainer's own version."""
    columns = (numbers(text) for text in (REWARD_MEAN, REWARD_STD, ENTROPY, SAMPLE_SIZE))
    return [
        {
            "update": update,
            "reward_mean": mean,
            "reward_std": std,
            "entropy": entropy,
            "effective_sample_size": size,
            "token_effective_sample_size": min(1.0, 0.1 + size),
            "mismatch_kl": 1e-13 if update % 3 == 0 else 0.0,
            "mismatch_tokens": 500.0 if update % 3 == 0 else 0.0,
        }
        for update, (mean, std, entropy, size) in enumerate(zip(*columns, strict=True))
    ]


def steady(count, seed=0, **changes):
    """Lines of a run that neither learns nor collapses, with noise of a tenth; changes are a factor by name."""
    draw = random.Random(seed)
    level = {
        "reward_mean": 0.4,
        "reward_std": 0.45,
        "entropy": 0.8,
        "effective_sample_size": 0.7,
        "token_effective_sample_size": 0.95,
        "mismatch_kl": 2e-4,
    }
    return [
        {"update": update, "mismatch_tokens": 100.0}
        | {name: value * changes.get(name, 1.0) * draw.uniform(0.9, 1.1) for name, value in level.items()}
        for update in range(count)
    ]


def watch(lines):
    """The kinds that hold at each update, and everything that was said."""
    history, kinds, said = History(), [], []
    for update, line in enumerate(lines):
        now, new = history.add({**line, "update": update})
        kinds.append(now)
        said += new
    return kinds, said, history


def test_a_normal_quickstart_raises_nothing():
    kinds, said, history = watch(quickstart())
    assert len(kinds) == 100
    assert not any(kinds)
    assert said == []
    assert history.seen == {}


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_raises_nothing(seed):
    assert watch(steady(200, seed))[1] == []


@pytest.mark.parametrize("seed", range(10))
def test_the_noise_of_sequences_that_are_too_long_to_weigh_raises_nothing(seed):
    draw = random.Random(seed)
    lines = [{**line, "effective_sample_size": draw.uniform(0.01, 0.15)} for line in steady(100, seed)]
    assert watch(lines)[1] == []


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"token_effective_sample_size": 0.2}, "effective-sample-size", "of its tokens fell from 0.9"),
        ({"effective_sample_size": 0.1}, "effective-sample-size", "of its sequences fell from 0."),
        ({"entropy": 0.05}, "entropy", "the reward did not rise"),
        ({"mismatch_kl": 30.0}, "mismatch", "engine and trainer compute the same version differently"),
    ],
)
def test_what_falls_off_a_cliff_is_said_once_and_listed_while_it_holds(change, kind, words):
    healthy = 40
    kinds, said, history = watch(steady(healthy) + steady(10, seed=1, **change))
    begins = next(update for update, now in enumerate(kinds) if now)
    assert healthy < begins < healthy + RECENT, "not at the first odd batch, and soon after"
    assert all(now == [kind] for now in kinds[begins : healthy + 8])
    assert len(said) == 1
    assert said[0].startswith(f"update {begins}: the run may be collapsing: ")
    assert words in said[0]
    assert history.seen == {kind: begins}


def test_one_odd_batch_is_no_collapse():
    odd = steady(1, token_effective_sample_size=0.1, effective_sample_size=0.1, entropy=0.01, mismatch_kl=1_000.0)
    assert watch(steady(30) + odd + steady(30, seed=2))[1] == []


def test_entropy_that_falls_while_the_reward_rises_is_learning():
    assert watch(steady(40) + steady(10, entropy=0.05, reward_mean=2.0))[1] == []


def test_a_mismatch_that_grows_slowly_is_seen_against_the_beginning():
    lines = [line for step in range(60) for line in steady(1, seed=step, mismatch_kl=1.05**step)]
    assert [sign.split(": ")[2].split(" compute")[0] for sign in watch(lines)[1]] == ["engine and trainer"]


def test_a_mismatch_that_nobody_would_notice_is_none():
    lines = [{**line, "mismatch_kl": 1e-12 * 1.2**step} for step, line in enumerate(steady(80))]
    assert watch(lines)[1] == []


def test_updates_that_measured_no_mismatch_are_no_zero():
    lines = steady(80)
    for line in lines[::2]:
        line |= {"mismatch_kl": 0.0, "mismatch_tokens": 0.0}
    assert watch(lines)[1] == []


def test_a_run_that_has_just_begun_has_no_past():
    few = LEAST + RECENT - 1
    assert watch(steady(few - RECENT) + steady(RECENT, entropy=0.001, token_effective_sample_size=0.01))[1] == []


def test_numbers_that_are_missing_or_not_finite_are_left_out():
    lines = [{**line, "entropy": float("nan")} for line in steady(40)]
    lines += [{"update": 0}] * 10
    assert watch(lines)[1] == []


def test_the_history_is_bounded_and_goes_on_where_a_checkpoint_left_it():
    lines = steady(200) + steady(10, entropy=0.05)
    straight, resumed = History(), History()
    for line in lines[:204]:
        straight.add(line)
        resumed.add(line)
    resumed = History(**json.loads(json.dumps(asdict(resumed))))
    assert [straight.add(line) for line in lines[204:]] == [resumed.add(line) for line in lines[204:]]
    assert len(resumed.last) == RECENT + PAST
    assert len(resumed.first) == PAST
    assert list(resumed.seen) == ["entropy"]


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(json.loads(json.dumps(record)))


def test_a_collapse_is_recorded_with_its_update_and_shown_once():
    sink, screen = Kept(), io.StringIO()
    tally, observer = Tally(rows=1, sink=sink), Plain(Console(file=screen, width=500), steps=1_000, every_s=1e9)
    for update, line in enumerate(steady(40) + steady(10, seed=1, entropy=0.05)):
        report = UpdateReport(update, {**line, "update": update, "num_sequences": 1.0}, 0.0, 0, 1.0)
        observer.updated(tally.trained([], report, started=0.0, ended=1.0, idle_s=0.0, waited_for=""))
    kinds = [record["collapsing"] for record in sink.records]
    began = kinds.index(["entropy"])
    assert 40 < began < 40 + RECENT
    assert not any(kinds[:began])
    assert [bool(record["warnings"]) for record in sink.records] == [update == began for update in range(50)]
    assert screen.getvalue().count("the run may be collapsing: entropy fell") == 1
    assert tally.summary()["collapsing"] == {"entropy": began}
