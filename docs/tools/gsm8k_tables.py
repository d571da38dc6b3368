"""The tables of GSM8K runs in `docs/performance.md` and `README.md`: which runs, and which figures of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from docs.tools.measured_tables import (
    LARGE,
    SMALL,
    SMOL,
    Figure,
    Record,
    Run,
    as_markdown,
    curve_of,
    factor,
    figures_of,
    find_cell,
    held_out,
    hundredth,
    mean,
    mean_age,
    mean_of,
    of_trl,
    ours,
    percent,
    rate_of,
    result,
    rewards_of_versions,
    seconds_to,
    tenth,
    thousandth,
    trained_rate,
    whole,
    whole_test,
)

SYNCHRONOUS: Mapping[str, Any] = {"paradigm": "synchronous"}
ASYNCHRONOUS: Mapping[str, Any] = {"paradigm": "multi-version"}
WHOLE_TEST = 1_319  # problems
MOST_TOKENS = 4_096  # of an answer in the runs with a long tail

SPEED: Mapping[str, Figure] = {
    "updates": result("updates", whole),
    "seconds of training": result("wall_s", whole),
    "seconds an update, after the first": result("seconds_per_update", tenth),
    "trained tokens/s, after the first": trained_rate,
    "the same, without updates that overlapped an evaluation": result("tokens_per_s_undisturbed", whole),
    "trainer idle": result("trainer_idle_share", percent),
    "rollout idle": result("rollout_idle_share", percent),
    "age, mean": mean_age,
}
STARTS: Mapping[str, Figure] = {
    "start-up, s": result("startup_s", whole),
    "first update, s": result("first_update_s", tenth),
}
TEST: Mapping[str, Figure] = {
    "whole test at temperature 1, before": whole_test("before_sampled"),
    "whole test at temperature 1, after": whole_test("after_sampled"),
    "whole test, greedy, before": whole_test("before_greedy"),
    "whole test, greedy, after": whole_test("after_greedy"),
}
TEST_AFTER: Mapping[str, Figure] = {
    "whole test at temperature 1, after": whole_test("after_sampled"),
    "whole test, greedy, after": whole_test("after_greedy"),
}


# -- 1.5B --------------------------------------------------------------------------------------------------------------

_large = partial(ours, folder="gsm8k", model=LARGE)
_trl_large = partial(of_trl, folder="gsm8k", model="model")  # the name of the folder then


def large_runs() -> str:
    """Runs of the 1.5B model beside TRL's."""
    runs = [
        _large("`K = 2`, seed 0", seed=0, **ASYNCHRONOUS),
        _large("`synchronous`, seed 0", seed=0, **SYNCHRONOUS),
        _large("`K = 2`, seed 1", seed=1, **ASYNCHRONOUS),
        _large("`synchronous`, seed 1", seed=1, **SYNCHRONOUS),
        _trl_large("TRL"),
    ]
    return figures_of(runs, {**SPEED, **STARTS, **TEST})


def one_sitting() -> str:
    """The recipe as it is, `synchronous`, and TRL's asynchronous trainer, in one sitting."""
    figures: Mapping[str, Figure] = {
        **SPEED,
        **STARTS,
        "score at the end": result("eval_after", thousandth),
        "problems of that score": _problems,
    }
    return figures_of(_of_one_sitting(), figures)


def recipe_curve() -> str:
    """Held-out scores of the recipe as it is."""
    results = _recipe().training["results"]
    points = zip(results["evaluations"], results["greedy"], strict=True)
    rows = (
        [str(each["version"]), whole(each["elapsed_s"]), thousandth(each["score"]), thousandth(greedy)]
        for each, greedy in points
    )
    return as_markdown(["update", "seconds", "temperature 1", "greedy"], rows)


def _of_one_sitting() -> list[Run]:
    runs = [
        _recipe("`recipes/gsm8k.toml` as it is (`K = 2`, seed 0)"),
        _large("`synchronous`, seed 1", seed=1, **SYNCHRONOUS),
        _trl_async("TRL, asynchronous"),
    ]
    assert len({run.training["sitting"] for run in runs}) == 1, "the table is of one sitting"
    return runs


def _recipe(heading: str = "") -> Run:
    return Run(heading, find_cell("gsm8k/recipe", "recipe", "native", recipe="gsm8k"))


def _trl_async(heading: str = "") -> Run:
    return Run(heading, find_cell("gsm8k", "gsm8k", "trl-async", model=LARGE, inflight=-1, queue=1_024))


def _problems(run: Run) -> str:
    return whole(run.training["results"]["evaluations"][-1]["num_scored"])


def large_curve() -> str:
    """Held-out scores of the 1.5B model."""
    runs = [
        _large("`K = 2`, seed 0", seed=0, **ASYNCHRONOUS),
        _large("`synchronous`, seed 0", seed=0, **SYNCHRONOUS),
        _large("`K = 2`, seed 1", seed=1, **ASYNCHRONOUS),
        _large("`synchronous`, seed 1", seed=1, **SYNCHRONOUS),
    ]
    return curve_of(runs)


def large_curve_of_trl() -> str:
    """Held-out scores of the 1.5B model with TRL."""
    return curve_of([_trl_large("TRL")])


def front_page() -> str:
    """The table of README.md: means over the seeds of both of our modes, and TRL."""
    modes = [[_large("", seed=seed, **mode) for seed in (0, 1)] for mode in (ASYNCHRONOUS, SYNCHRONOUS)]
    trl = _trl_large("TRL")
    updates = int(trl.training["results"]["updates"])
    first = modes[0][0]
    last, before = first.training["results"]["updates"], _test_score(first, "before_sampled")

    def means(figure: Callable[[Run], float], show: Callable[[float], str]) -> list[str]:
        return [show(mean(figure(run) for run in runs)) for runs in modes]

    def score(run: Run) -> float:
        evaluation = _evaluation(run, updates)
        assert evaluation["num_scored"] == WHOLE_TEST
        return float(evaluation["score"])

    rows = [
        [
            "seconds an update",
            *means(lambda run: float(run.training["results"]["seconds_per_update"]), tenth),
            tenth(trl.training["results"]["seconds_per_update"]),
        ],
        [
            f"seconds of training until update {updates}",
            *means(lambda run: _seconds_at(run, updates), whole),
            whole(trl.training["results"]["wall_s"]),
        ],
        [
            f"accuracy then, {WHOLE_TEST:,} problems",
            *means(score, thousandth),
            thousandth(_test_score(trl, "after_sampled")),
        ],
        [
            f"seconds of training until update {last}",
            *means(lambda run: float(run.training["results"]["wall_s"]), whole),
            "",
        ],
        [
            f"accuracy then ({thousandth(before)} before)",
            *means(lambda run: _test_score(run, "after_sampled"), thousandth),
            "",
        ],
        [
            f"the same, greedy ({thousandth(_test_score(first, 'before_greedy'))} before)",
            *means(lambda run: _test_score(run, "after_greedy"), thousandth),
            "",
        ],
    ]
    return as_markdown(["", "Stretto, `K = 2`", "Stretto, `synchronous`", "TRL"], rows)


def _test_score(run: Run, name: str) -> float:
    assert run.test is not None
    return float(run.test["results"][name])


# -- 0.5B --------------------------------------------------------------------------------------------------------------

_small = partial(ours, folder="gsm8k/0.5b", model=SMALL)
_aged = partial(ours, folder="gsm8k/0.5b/ages", model=SMALL)
_synchronous = partial(_small, "`synchronous`", seed=0, **SYNCHRONOUS)
_full_512 = partial(_small, seed=0, in_flight="full", **ASYNCHRONOUS)
_full_1536 = partial(_aged, seed=0, staleness=2, rows=1_536, in_flight="full", **ASYNCHRONOUS)
_full_4608 = partial(_aged, seed=0, staleness=8, rows=4_608, in_flight="full", **ASYNCHRONOUS)
_age_1 = partial(_aged, seed=0, staleness=1, **ASYNCHRONOUS)
_age_4 = partial(_aged, seed=0, staleness=4, in_flight="full", **ASYNCHRONOUS)


def small_runs() -> str:
    """Seed 0 of the 0.5B model beside TRL's run."""
    runs = [
        _full_512('`K = 2`, everything in flight (`in_flight = "full"`)'),
        _synchronous(),
        of_trl("TRL", "gsm8k/0.5b", SMALL),
    ]
    return figures_of(runs, {**SPEED, **STARTS, **TEST})


def small_curve() -> str:
    """Held-out scores of seed 0 of the 0.5B model, and TRL's."""
    return curve_of([_full_512("`K = 2`"), _synchronous(), of_trl("TRL", "gsm8k/0.5b", SMALL)])


def small_seeds() -> str:
    """Seeds 1 and 2 of the 0.5B model."""
    runs = [
        _small("`K = 2`, seed 1", seed=1, **ASYNCHRONOUS),
        _small("`synchronous`, seed 1", seed=1, tested=False, **SYNCHRONOUS),
        _small("`K = 2`, seed 2", seed=2, **ASYNCHRONOUS),
        _small("`synchronous`, seed 2", seed=2, **SYNCHRONOUS),
    ]
    figures = {**SPEED, "length, mean": result("length_mean", whole)}
    figures |= {f"held-out score, update {update}": held_out(update) for update in range(0, 101, 20)}
    return figures_of(runs, {**figures, "seconds to update 60": seconds_to(60), **TEST_AFTER})


def in_flight() -> str:
    """Rates by what is in flight."""
    rates = partial(ours, folder="gsm8k/0.5b/rates", model=SMALL, tested=False, **ASYNCHRONOUS)
    runs = {
        ("0", "1 batch", "512"): _synchronous(),
        ("2", "1.5 batches (the default before)", "512"): rates("", staleness=2),
        ("2", "3 batches", "512"): _full_512(""),
        ("4", "5 batches", "512"): rates("", staleness=4, in_flight="full"),
        ("2", "3 batches", "1,536 (the default)"): _full_1536(""),
        ("8", "9 batches", "4,608"): _full_4608(""),
    }
    figures: Mapping[str, Figure] = {
        "tokens/s, updates 2 to 20": rate_of(2, 20),
        "tokens/s, updates 1 to 20": rate_of(1, 20),
        "age, mean": mean_of("staleness_mean", 2, 20, hundredth),
        "rows idle": result("row_idle_share", percent),
    }
    rows = ([*names, *(figure(run) for figure in figures.values())] for names, run in runs.items())
    return as_markdown(["`K`", "`rollout.in_flight`", "`rollout.rows`", *figures], rows)


def ages() -> str:
    """Seed 0 by age."""
    runs = [
        _synchronous(),
        _age_1("`K = 1`, 1,024 rows, faster code"),
        _full_512("`K = 2`, 512 rows"),
        _full_1536("`K = 2`, 1,536 rows"),
        _age_4("`K = 4`, 2,560 rows, faster code"),
        _full_4608("`K = 8`, 4,608 rows"),
    ]
    figures: Mapping[str, Figure] = {
        "age, mean": mean_age,
        "seconds of training": result("wall_s", whole),
        "trained tokens/s, after the first": trained_rate,
        "trained tokens/s, all updates": result("tokens_per_s", whole),
        "trainer idle": result("trainer_idle_share", percent),
        "effective sample size, last 20 updates": mean_of("effective_sample_size", 81, 100, hundredth),
        **TEST_AFTER,
    }
    return figures_of(runs, figures)


def costs_of_age() -> str:
    """Points that seed 0 loses by age on the whole test, against `synchronous`."""
    base = _synchronous()
    runs = [
        _age_1("`K = 1`"),
        _full_512("`K = 2`, 512 rows"),
        _full_1536("`K = 2`, 1,536 rows"),
        _age_4("`K = 4`, everything in flight"),
        _full_4608("`K = 8`, everything in flight"),
    ]
    rows = []
    for run in runs:
        cells = [run.heading, mean_age(run)]
        for name in ("after_sampled", "after_greedy"):
            one, other = _test_score(run, name), _test_score(base, name)
            error = math.sqrt((one * (1 - one) + other * (1 - other)) / WHOLE_TEST)
            cells += [f"{100 * (one - other):+.1f}", f"{100 * error:.1f}"]
        rows.append(cells)
    return as_markdown(
        ["", "mean age", "points, temperature 1", "standard error", "points, greedy", "standard error"], rows
    )


def _rewards(*runs: Run) -> str:
    bounds = ((0, 19), (20, 39), (40, 59), (60, 75), (76, None))
    names = [f"{first} and later" if last is None else f"{first} to {last}" for first, last in bounds]
    figures = [rewards_of_versions(first, last) for first, last in bounds]
    rows = ([name, *(figure(run) for run in runs)] for name, figure in zip(names, figures, strict=True))
    return as_markdown(["version that generated", *(run.heading for run in runs)], rows)


def rewards_by_age() -> str:
    """Rewards in training of seed 0 by age."""
    return _rewards(
        _small("`synchronous`, seed 0", seed=0, **SYNCHRONOUS),
        _age_1("`K = 1`, seed 0"),
        _full_1536("`K = 2`, 1,536 rows, seed 0"),
        _age_4("`K = 4`, 2,560 rows, seed 0"),
        _full_4608("`K = 8`, 4,608 rows, seed 0"),
    )


def rewards_of_seeds() -> str:
    """Rewards in training of seeds 1 and 2."""
    return _rewards(
        _small("`synchronous`, seed 1", seed=1, tested=False, **SYNCHRONOUS),
        _small("`K = 2`, seed 1", seed=1, **ASYNCHRONOUS),
        _small("`synchronous`, seed 2", seed=2, **SYNCHRONOUS),
        _small("`K = 2`, seed 2", seed=2, **ASYNCHRONOUS),
    )


def old_data() -> str:
    """Half the learning rate and `cispo` at age 7, over 60 updates."""
    other = partial(ours, model=SMALL, tested=False, staleness=8, in_flight="full", **ASYNCHRONOUS)
    runs = [
        _small("`synchronous`, `grpo`", seed=0, **SYNCHRONOUS),
        _full_4608("`K = 8`, `grpo`"),
        other("`K = 8`, `grpo`, half the rate", "gsm8k/0.5b/ages/half_rate"),
        other("`K = 8`, `cispo`", "gsm8k/0.5b/ages/cispo"),
    ]
    figures: dict[str, Figure] = {"age, mean": mean_of("staleness_mean", 1, 60, lambda age: f"{age:.2g}")}
    figures |= {
        f"reward, versions {first} to {last}": rewards_of_versions(first, last)
        for first, last in ((0, 19), (20, 39), (40, 51))
    }
    figures |= {f"held-out score, update {update}": held_out(update) for update in (20, 40, 60)}
    figures["effective sample size, updates 41 to 60"] = mean_of("effective_sample_size", 41, 60, hundredth)
    return figures_of(runs, figures)


# -- other runs --------------------------------------------------------------------------------------------------------


def shared_prompts() -> str:
    """An update with prompts computed once and repeated."""
    cells = {
        heading: find_cell("shared_prompts", "shared-prompts", "native", model=SMALL, prompt=prompt)["results"]
        for heading, prompt in (("0.5B, GSM8K's prompts", 0), ("0.5B, prompts of 1,024 tokens", 1_024))
    }
    figures = {
        "seconds of an update, prompts repeated": ("repeated_s", thousandth),
        "seconds of an update, prompts shared": ("shared_s", thousandth),
        "speed-up": ("speedup", factor),
        "fewer tokens in linear layers": ("fewer_tokens", percent),
    }
    rows = ([title, *(show(cell[name]) for cell in cells.values())] for title, (name, show) in figures.items())
    return as_markdown(["", *cells], rows)


def smollm2() -> str:
    """SmolLM2-135M beside TRL."""
    folder = "gsm8k/smollm2/one_sitting"
    swept = partial(find_cell, folder, "gsm8k-sweep", "trl", model=SMOL, liger=0)
    run = partial(ours, model=SMOL, tested=False, **ASYNCHRONOUS)
    full = partial(run, folder=folder, in_flight="full")
    runs = [
        Run("TRL, micro-batches of 64 (its fastest; two updates)", swept(micro=64)),
        Run("TRL, micro-batches of 128 (two updates)", swept(micro=128)),
        of_trl("TRL, micro-batches of 64, Liger (six updates)", folder, SMOL, tested=False),
        run("Stretto, 1.5 batches in flight, 256 rows (the default before)", folder),
        full("Stretto, 3 batches in flight, 512 rows", rows=512),
        full("Stretto, 3 batches in flight, 768 rows (the default)", rows=768),
        run("the same with faster decode kernels, in a later sitting", "gsm8k/smollm2/kernels"),
    ]
    fastest = max(run.training["results"]["tokens_per_s"] for run in runs if run.training["side"] == "trl")

    def over_trl(run: Run) -> str:
        results = run.training["results"]
        return "" if run.training["side"] == "trl" else f"{results['tokens_per_s_after_first'] / fastest:.1f} x"

    def seconds(run: Run) -> str:
        show = tenth if run.training["side"] == "trl" else hundredth
        return show(run.training["results"]["seconds_per_update"])

    figures: Mapping[str, Figure] = {
        "trained tokens/s, after the first update": trained_rate,
        "seconds an update": seconds,
        "age, mean": mean_age,
        "rows idle": result("row_idle_share", percent),
        "over TRL's fastest": over_trl,
    }
    rows = ([run.heading, *(figure(run) for figure in figures.values())] for run in runs)
    return as_markdown(["", *figures], rows)


_tail = partial(ours, folder="tail/gsm8k", model=SMALL, tested=False)
_tail_full = partial(_tail, staleness=4, rows=512, in_flight="full", **ASYNCHRONOUS)
_tail_synchronous = partial(_tail, "`synchronous`", **SYNCHRONOUS)


def tail() -> str:
    """Answers of up to 4,096 tokens: speed."""
    runs = [_tail_full("`K = 4`, everything in flight, 512 rows"), _tail_synchronous()]
    first, second = runs

    def longest(run: Run) -> str:
        return str(sum(each["length_max"] >= MOST_TOKENS for each in run.updates))

    def ratio(name: str, *, more: bool) -> str:
        one, other = (float(run.training["results"][name]) for run in runs)
        return factor(one / other if more else other / one)

    def score(update: int) -> str:
        found = {thousandth(each["score"]) for run in runs if (each := run.score(update)) is not None}
        assert len(found) == 1, "the row is for scores that are equal"
        return found.pop()

    rows = [
        ["seconds of training, 40 updates", *map(result("wall_s", whole), runs), ratio("wall_s", more=False)],
        [
            "seconds an update, after the first",
            *map(result("seconds_per_update", tenth), runs),
            ratio("seconds_per_update", more=False),
        ],
        [
            "trained tokens/s, after the first",
            *map(trained_rate, runs),
            ratio("tokens_per_s_after_first", more=True),
        ],
        *(
            [
                f"seconds to {score(update)}{' on 512 held-out problems' * (update == 20)} (update {update})",
                *(whole(_seconds_at(run, update)) for run in runs),
                factor(_seconds_at(second, update) / _seconds_at(first, update)),
            ]
            for update in (20, 30)
        ),
        ["updates whose longest answer has 4,096 tokens", *map(longest, runs), ""],
        ["length, mean", *map(result("length_mean", whole), runs), ""],
        ["trainer idle", *map(result("trainer_idle_share", percent), runs), ""],
        ["rows idle", *map(result("row_idle_share", percent), runs), ""],
        ["age, mean", *map(mean_age, runs), ""],
    ]
    return as_markdown(["", *(run.heading for run in runs), "ratio"], rows)


def tail_curve() -> str:
    """Answers of up to 4,096 tokens: held-out scores."""
    return curve_of([_tail_full("`K = 4`"), _tail_synchronous()])


def in_short() -> str:
    """The main figures, each beside what it is compared with."""
    large = [_large("", seed=seed, **ASYNCHRONOUS) for seed in (0, 1)]
    large_synchronous = [_large("", seed=seed, **SYNCHRONOUS) for seed in (0, 1)]
    trl, small_trl = _trl_large("TRL"), of_trl("TRL", "gsm8k/0.5b", SMALL)
    last = int(trl.training["results"]["updates"])
    best = max(small_trl.training["results"]["evaluations"], key=lambda each: float(each["score"]))
    small = [_full_512(""), _full_1536(""), *(_small("", seed=seed, **ASYNCHRONOUS) for seed in (1, 2))]
    slowest = max(_seconds_to_score(run, best["score"]) for run in small)
    long = [_seconds_at(run, 30) for run in (_tail_full(""), _tail_synchronous())]
    smol = ours(
        "", "gsm8k/smollm2/one_sitting", model=SMOL, tested=False, in_flight="full", rows=768, **ASYNCHRONOUS
    ).training["results"]
    smol_trl = find_cell("gsm8k/smollm2/one_sitting", "gsm8k-sweep", "trl", model=SMOL, liger=0, micro=64)["results"]
    rates = [run.training["results"]["tokens_per_s_after_first"] for run in (large[0], large_synchronous[0])]
    recipe, _, trl_async = (run.training["results"] for run in _of_one_sitting())
    scores = [mean(_test_score(run, "after_sampled") for run in runs) for runs in (large, large_synchronous)]
    errors = [f" ± {math.sqrt(score * (1 - score) / (len(large) * WHOLE_TEST)):.3f}" for score in scores]
    seconds = mean(_seconds_at(run, last) for run in large)
    ten_minutes = float(trl.training["results"]["wall_s"])
    update = mean(run.training["results"]["seconds_per_update"] for run in large)
    trl_update = float(trl.training["results"]["seconds_per_update"])
    rows = [
        [
            "GSM8K, 1.5B: seconds to the score that TRL has after ten minutes (`K = 2`, mean of two seeds)",
            whole(seconds), "TRL 1.16", whole(ten_minutes), f"{ten_minutes / seconds:.1f} x",
        ],
        [
            "GSM8K, 1.5B: seconds an update (`K = 2`, mean of two seeds)",
            tenth(update), "TRL 1.16", tenth(trl_update), f"{trl_update / update:.1f} x",
        ],
        [
            "GSM8K, 1.5B: trained tokens/s (`recipes/gsm8k.toml` as it is)",
            whole(recipe["tokens_per_s_after_first"]), "TRL 1.16, asynchronous", whole(trl_async["tokens_per_s"]),
            f"{recipe['tokens_per_s_after_first'] / trl_async['tokens_per_s']:.1f} x",
        ],
        [
            "GSM8K, 0.5B: seconds to TRL's best score (`K = 2`, the slowest of four runs)",
            whole(slowest), "TRL 1.16", whole(best["elapsed_s"]), f"{best['elapsed_s'] / slowest:.1f} x",
        ],
        [
            "SmolLM2-135M: trained tokens/s (`K = 2`)",
            whole(smol["tokens_per_s_after_first"]), "TRL 1.16, its fastest", whole(smol_trl["tokens_per_s"]),
            f"{smol['tokens_per_s_after_first'] / smol_trl['tokens_per_s']:.1f} x",
        ],
        [
            "answers of up to 4,096 tokens, 0.5B: seconds to a score (`K = 4`)",
            whole(long[0]), "`synchronous`", whole(long[1]), f"{long[1] / long[0]:.1f} x",
        ],
        [
            "answers of up to 512 tokens, 1.5B: trained tokens/s (`K = 2`, seed 0)",
            whole(rates[0]), "`synchronous`", whole(rates[1]), factor(rates[0] / rates[1]),
        ],
        [
            "the same: accuracy after 60 updates (means of two seeds)",
            thousandth(scores[0]) + errors[0], "`synchronous`", thousandth(scores[1]) + errors[1], "",
        ],
    ]  # fmt: skip
    return as_markdown(["what", "Stretto", "against", "their figure", "ratio"], rows)


def _seconds_at(run: Run, update: int) -> float:
    """Returns the seconds of training until the evaluation after so many updates."""
    return float(_evaluation(run, update)["elapsed_s"])


def _evaluation(run: Run, update: int) -> Record:
    """Returns the evaluation after so many updates, which must be there."""
    found = run.score(update)
    assert found is not None, f"{run.heading}: no evaluation after update {update}"
    return found


def _seconds_to_score(run: Run, score: float) -> float:
    """Returns the seconds of training until the first evaluation that is not below a score."""
    evaluations = run.training["results"]["evaluations"]
    return min(float(each["elapsed_s"]) for each in evaluations if each["score"] is not None and each["score"] >= score)


# -- all of them -------------------------------------------------------------------------------------------------------

TABLES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": {"gsm8k": front_page},
    "docs/performance.md": {
        "gsm8k-in-short": in_short,
        "gsm8k-costs-of-age": costs_of_age,
        "gsm8k-runs": large_runs,
        "gsm8k-curve": large_curve,
        "gsm8k-curve-trl": large_curve_of_trl,
        "gsm8k-one-sitting": one_sitting,
        "gsm8k-recipe-curve": recipe_curve,
        "gsm8k-small-runs": small_runs,
        "gsm8k-small-curve": small_curve,
        "gsm8k-small-seeds": small_seeds,
        "gsm8k-in-flight": in_flight,
        "gsm8k-ages": ages,
        "gsm8k-rewards-by-age": rewards_by_age,
        "gsm8k-rewards-of-seeds": rewards_of_seeds,
        "gsm8k-old-data": old_data,
        "shared-prompts": shared_prompts,
        "smollm2": smollm2,
        "gsm8k-tail": tail,
        "gsm8k-tail-curve": tail_curve,
    },
}
