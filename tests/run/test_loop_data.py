"""What a recipe may do with its data beyond training each group once: filter, draw by pass rate, use again."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from loop_cases import Bench, Characters, InProcess, broken, plan

from stretto.assembly.resume import kept_again
from stretto.core.controller import Controller
from stretto.core.paradigms import PARADIGMS
from stretto.engines.fake import FakeEngine
from stretto.environments.data import PromptStream, Row
from stretto.environments.prompt_order import PassRates
from stretto.run.recovery import recall_draws, snapshot
from stretto.store.journal import Journal
from stretto.store.reader import JournalReader
from stretto.store.verify import format_findings, verify
from stretto.training.fake import FakeTrainer
from stretto.types import Completion, Prompt

ROWS = tuple(Row(text=f"{n}+{n}=", columns={"answer": 2 * n}) for n in range(64))


def lines(folder: Path) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in read if line["kind"] == "update"]


def stopped_after(bench: Bench, update: int) -> Bench:
    """Run until an update is done, and stop there."""

    def stop(line: Mapping[str, Any]) -> None:
        if line["update"] == update:
            bench.loop.stop()

    bench.watcher.after_update = stop
    assert bench.run() is False
    return bench


# -- groups without signal ---------------------------------------------------------------------------------------------


def every_third_is_solved(prompt: Prompt, completion: Completion, attempt: int) -> float:
    """The prompts whose number is a multiple of three are all right; others depend on the completion."""
    return 1.0 if prompt.row["answer"] % 3 == 0 else float(completion.id % 2)


def filtering(folder: Path, paradigm: str = "multi-version", **options: Any) -> Bench:
    return Bench(
        folder,
        plan(paradigm, filter_limit=30, **options),
        engines=[FakeEngine(rows=12, step_s=0.0005, sigma=1.3)],
        trainer=FakeTrainer(update_s=0.003),
        environment=InProcess(every_third_is_solved),
        rows=ROWS,
    )


@pytest.mark.parametrize("paradigm", list(PARADIGMS))
def test_groups_without_signal_are_replaced_counted_and_verified(paradigm: str, tmp_path: Path) -> None:
    bench = filtering(tmp_path, paradigm)
    assert bench.run()
    assert broken(tmp_path) == []
    counters = bench.loop.controller.counters
    assert counters.filtered_groups > 2, "nothing was filtered; the test shows nothing"
    assert (counters.trained_groups, counters.spared_groups) == (6 * 3, 0)
    with JournalReader(tmp_path) as reader:
        counts = reader.counts()
    assert (counts["trained"], counts["filtered"]) == (72, counters.filtered)
    assert not filtered_groups(tmp_path) & {sample.group for sample in samples(bench)}
    assert all(len({s.reward for s in group}) > 1 for group in groups(bench))
    summary = bench.tally.summary()
    assert summary["filtered_groups"] == counters.filtered_groups == sum(x["filtered_groups"] for x in lines(tmp_path))
    assert summary["filtered_trajectories"] == counters.filtered
    assert summary["filtered_reward"] == 1.0
    ended = counters.trained + counters.filtered + counters.dropped
    assert summary["filtered_share"] == pytest.approx(counters.filtered / ended)
    assert summary["trained_length"] > 0 < summary["filtered_length"]


def filtered_groups(folder: Path) -> set[int]:
    with JournalReader(folder) as reader:
        return {id // 4 for id in reader.ids("filtered")}


def samples(bench: Bench) -> list[Any]:
    return [sample for batch in bench.trainer.batches for sample in batch.samples]


def groups(bench: Bench) -> list[list[Any]]:
    found: dict[int, list[Any]] = {}
    for sample in samples(bench):
        found.setdefault(sample.group, []).append(sample)
    return list(found.values())


def test_length_ratio_tells_what_filtering_does_to_lengths(tmp_path: Path) -> None:
    class SolvesShort(InProcess):
        """A prompt is solved by all where its first completion is short."""

        def __init__(self) -> None:
            super().__init__()
            self.short: dict[int, bool] = {}

        async def episode(self, prompt: Prompt, policy: Any) -> float:
            completion = await policy.generate(prompt.tokens)
            short = self.short.setdefault(prompt.index, len(completion.tokens) < 20)
            return 1.0 if short else float(completion.id % 2)

    bench = filtering(tmp_path)
    bench.environment = SolvesShort()
    assert bench.run()
    summary = bench.tally.summary()
    assert summary["filtered_length"] < summary["trained_length"]
    assert summary["length_ratio"] > 1.0, "what is trained is longer than what was sampled"
    totals = bench.tally.totals
    mean = (totals.tokens + totals.filtered_tokens) / (totals.trained + totals.filtered)
    assert summary["length_ratio"] == pytest.approx(summary["trained_length"] / mean)


def test_a_data_set_without_any_signal_comes_to_its_end_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(
        tmp_path, plan(updates=4, filter_limit=5), environment=InProcess(lambda prompt, completion, attempt: 0.0)
    )
    with caplog.at_level(logging.WARNING):
        assert bench.run()
    assert broken(tmp_path) == []
    counters = bench.loop.controller.counters
    assert (counters.trained_groups, counters.filtered_groups, counters.spared_groups) == (12, 20, 12)
    assert "5 groups (`rollout.filter_limit`) were filtered before update 0" in caplog.text
    with JournalReader(tmp_path) as reader:
        assert [kind for _, kind, _ in reader.notes()] == ["filter limit"] * 12


def test_synchronous_filtering_is_the_same_run_twice(tmp_path: Path) -> None:
    found = []
    for name, rows in (("a", 7), ("b", 12)):
        (tmp_path / name).mkdir()
        bench = filtering(tmp_path / name, "synchronous")
        bench.engines = [FakeEngine(rows=rows)]
        assert bench.run()
        with JournalReader(tmp_path / name) as reader:
            found.append(reader.versions())
    assert found[0] == found[1]


def test_a_stopped_run_goes_on_filtering(tmp_path: Path) -> None:
    first = stopped_after(filtering(tmp_path, updates=8), 3)
    before = first.loop.controller.counters.filtered_groups
    second = filtering(tmp_path, updates=8)
    second.trainer, second.snapshot = first.trainer, snapshot(first.journal.path, first.plan)
    second.rollouts, second.weights = first.loop.rollouts, first.loop.weights
    assert second.run()
    assert broken(tmp_path) == []
    counters = second.loop.controller.counters
    assert counters.trained_groups == 24
    assert counters.filtered_groups > before
    with JournalReader(tmp_path) as reader:
        assert reader.counts() == {"trained": 96, "filtered": counters.filtered}


# -- rows by their pass rate -------------------------------------------------------------------------------------------


def easy_or_hard(prompt: Prompt, completion: Completion, attempt: int) -> float:
    return float(prompt.row["answer"] < 12)


def by_rate(folder: Path, paradigm: str = "multi-version", updates: int = 30) -> Bench:
    return Bench(
        folder,
        plan(paradigm, updates=updates),
        environment=InProcess(easy_or_hard),
        rows=ROWS[:12],
        pass_rates=PassRates(12, seed=0),
    )


def test_rows_that_are_solved_come_less_often_and_every_draw_says_why(tmp_path: Path) -> None:
    bench = by_rate(tmp_path)
    assert bench.run()
    assert broken(tmp_path) == []
    with JournalReader(tmp_path) as reader:
        drawn = reader._rows("SELECT row_number, epoch, draw FROM groups ORDER BY group_id")
    assert all(epoch is None for _, epoch, _ in drawn)
    assert drawn[0][2] == "not scored yet, drawn with probability 0.0833"
    assert any(reason.startswith("pass rate 1.0000") for _, _, reason in drawn)
    count = Counter(row < 6 for row, _, _ in drawn)  # the answers of the first six rows are below 12
    assert count[False] > 2 * count[True] > 0


def test_the_draws_of_a_synchronous_run_are_those_of_another_and_go_on_after_a_stop(tmp_path: Path) -> None:
    def drawn(folder: Path) -> list[Any]:
        with JournalReader(folder) as reader:
            return reader._rows("SELECT row_number, draw FROM groups ORDER BY group_id")

    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    assert by_rate(tmp_path / "whole", "synchronous", updates=10).run()
    first = stopped_after(by_rate(tmp_path / "parts", "synchronous", updates=10), 4)
    second = by_rate(tmp_path / "parts", "synchronous", updates=10)
    second.prepare = lambda bench: recall_draws(bench.journal.path, bench.loop.prompts)
    second.trainer, second.snapshot = first.trainer, snapshot(first.journal.path, first.plan)
    second.rollouts, second.weights = first.loop.rollouts, first.loop.weights
    assert second.run()
    assert broken(tmp_path / "parts") == []
    assert drawn(tmp_path / "whole") == drawn(tmp_path / "parts")


# -- groups that are used again ----------------------------------------------------------------------------------------


def replaying(folder: Path, paradigm: str = "multi-version", **options: Any) -> Bench:
    return Bench(
        folder,
        plan(paradigm, staleness=3, replay_groups=2, replay_uses=2, **options),
        engines=[FakeEngine(rows=12, step_s=0.0005, sigma=1.3)],
        trainer=FakeTrainer(update_s=0.003),
        rows=ROWS,
    )


@pytest.mark.parametrize("paradigm", ["multi-version", "partial", "drop"])
def test_young_groups_are_used_again_recorded_apart_and_verified(paradigm: str, tmp_path: Path) -> None:
    bench = replaying(tmp_path, paradigm, updates=8)
    assert bench.run()
    assert broken(tmp_path) == []
    counters = bench.loop.controller.counters
    assert counters.replayed_groups > 4, "hardly anything was used again; the test shows nothing"
    assert counters.trained_groups == 24
    again = [sample for sample in samples(bench) if sample.use]
    assert len(again) == 4 * counters.replayed_groups
    for batch in bench.trainer.batches:
        uses = [sample.use for sample in batch.samples]
        assert uses[:12] == [0] * 12
        assert all(uses[12:])
        assert all(batch.update - sample.version <= 3 for sample in batch.samples)
    summary = bench.tally.summary()
    assert (summary["trained_trajectories"], summary["replayed_trajectories"]) == (96, len(again))
    assert sum(line["replayed_sequences"] for line in lines(tmp_path)) == len(again)
    assert sum(summary["staleness"]["histogram"].values()) == 96 + len(again)
    assert summary["replayed_tokens"] == sum(len(sample.completion.tokens) for sample in again)
    assert summary["tokens"] == sum(len(sample.completion.tokens) for sample in samples(bench) if not sample.use)
    assert f"96 trained once, {len(again)} later uses" in format_findings(verify(tmp_path))
    with JournalReader(tmp_path) as reader:
        assert [s.use for s in reader.batch(7)] == [s.use for s in bench.trainer.batches[7].samples]
        assert [r.num_again for r in reader.updates()] == [x["replayed_sequences"] for x in lines(tmp_path)]


def test_nothing_is_kept_that_cannot_be_used_again(tmp_path: Path) -> None:
    bench = replaying(tmp_path, updates=12)
    kept = []
    bench.watcher.after_update = lambda line: kept.append(len(bench.loop._updates._kept))
    assert bench.run()
    assert bench.loop._updates._kept.keys() == {
        each for group in bench.loop.controller.reuse.kept.values() for each in group.trajectories
    }
    assert max(kept) <= 4 * 3 * 4, "those of the last four updates"


def test_a_stopped_run_uses_again_what_the_journal_has(tmp_path: Path) -> None:
    first = stopped_after(replaying(tmp_path, updates=8), 3)
    told = snapshot(first.journal.path, first.plan)
    expected = first.loop._updates._kept
    assert expected, "nothing could be used again; the test shows nothing"
    second = replaying(tmp_path, updates=8)
    prompts = PromptStream(ROWS, Characters(), seed=0, max_prompt_tokens=64)
    with Journal.open(tmp_path / "journal.sqlite", resume=True) as journal:
        kept = kept_again(prompts, journal, Controller.restore(second.plan, told).reuse)
    assert kept.keys() == expected.keys()
    for id, rollout in kept.items():
        assert rollout.is_generated
        assert rollout.lineages[0].completion.tokens.tolist() == expected[id].lineages[0].completion.tokens.tolist()
        assert rollout.lineages[0].completion.logprobs.tolist() == expected[id].lineages[0].completion.logprobs.tolist()
        assert (rollout.reward, rollout.prompt) == (expected[id].reward, expected[id].prompt)
    second.trainer, second.snapshot, second.kept = first.trainer, told, kept
    second.rollouts, second.weights = first.loop.rollouts, first.loop.weights
    assert second.run()
    assert broken(tmp_path) == []
    assert second.loop.controller.counters.replayed_groups > first.loop.controller.counters.replayed_groups
