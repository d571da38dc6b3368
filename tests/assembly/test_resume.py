"""Runs that are taken up after the worst: with damaged or missing files, on other hardware, on a full disk."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_cases import assert_verifies, recipe, rows, run, story

from stretto.assembly.retrain import retrain
from stretto.errors import JournalError, RunError, TrainerError
from stretto.local.components import LocalComponents
from stretto.observe.progress import Observer, Silent
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import Recipe
from stretto.run.evaluation import Evaluator
from stretto.run.folder_checks import standing
from stretto.store.journal import Journal
from stretto.store.lock import Lock, is_alive
from stretto.store.version_files import VersionFiles
from stretto.training.trainer import LocalTrainer
from stretto.types import Batch, EvaluationResult, UpdateReport

KILLED_AT = 3


class Dies(Silent):
    """Ends the process, as far as the run can tell, as an update ends."""

    def updated(self, line: Mapping[str, Any]) -> None:
        if line["update"] == KILLED_AT:
            self.killed()

    @staticmethod
    def killed(*_: object, **__: object) -> None:
        raise KeyError("as if it were killed here")


class Heard(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def killed(model: Path, tmp_path: Path) -> Callable[..., Recipe]:
    def make(*overrides: str, lora: bool = True, observer: Observer | None = None) -> Recipe:
        made = recipe(model, tmp_path, "training.steps=6", "evaluation.prompts=0", *overrides, lora=lora)
        with pytest.raises(KeyError):
            run(made, tmp_path / "run", observer=observer or Dies())
        assert rows(tmp_path / "run", "SELECT COUNT(finished_at) FROM updates") == [(KILLED_AT + 1,)]
        return made

    return make


def damage(folder: Path) -> None:
    """Change a bit in the middle of every file."""
    for path in folder.rglob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


def go_on(made: Recipe, folder: Path) -> list[str]:
    heard = Heard()
    summary = run(made, folder, resume=True, observer=heard)
    assert (summary["steps"], summary["trained_trajectories"]) == (6, 72)
    assert_verifies(folder)
    return heard.said


@pytest.mark.parametrize(
    "trouble", ["nothing", "copies", "newest damaged", "all damaged", "no checkpoint", "no versions"]
)
def test_whatever_is_damaged_but_the_journal_the_run_goes_on_with_the_same_bits(
    model: Path, tmp_path: Path, killed: Callable[..., Recipe], trouble: str
) -> None:
    synchronous = 'rollout.paradigm="synchronous"'
    made = killed(synchronous, "runtime.checkpoint_seconds=0.000001")
    folder = tmp_path / "run"
    checkpoints = sorted((folder / "checkpoints").glob("[0-9]*"))  # how many depends on how long each took
    assert 1 <= len(checkpoints) <= 2, "the last two are kept"
    usable = [0, *(int(path.name) for path in checkpoints)]
    match trouble:
        case "copies":
            for suffix in (" copy", ".bak"):
                shutil.copytree(checkpoints[-1], checkpoints[-1].with_name(checkpoints[-1].name + suffix))
            shutil.copy(folder / "versions" / "000004.safetensors", folder / "versions" / "000004 copy.safetensors")
        case "newest damaged":
            damage(checkpoints[-1])
        case "all damaged":
            damage(folder / "checkpoints")
            damage(folder / "versions")
        case "no checkpoint":
            shutil.rmtree(folder / "checkpoints")
        case "no versions":
            shutil.rmtree(folder / "versions")
    said = " ".join(go_on(made, folder))
    assert ("is damaged" in said) == (trouble in ("newest damaged", "all damaged"))
    if trouble == "copies":
        for name in (f"{checkpoints[-1].name} copy", f"{checkpoints[-1].name}.bak", "000004 copy.safetensors"):
            assert f"{name}` has no name that this run gives, and is ignored" in said
        assert [path.name for path in (folder / "versions").iterdir()] == ["000004 copy.safetensors"]
    first = {"newest damaged": usable[-2], "all damaged": 0, "no checkpoint": 0}.get(trouble, usable[-1])
    assert f"updates {first} to 3 are trained again from the journal" in said
    run(recipe(model, tmp_path, "training.steps=6", "evaluation.prompts=0", synchronous), tmp_path / "whole")
    assert story(folder) == story(tmp_path / "whole")


def nudged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that rounds otherwise: every update ends with one other bit."""
    original: Callable[[LocalTrainer, Batch], UpdateReport] = LocalTrainer.update

    def update(self: LocalTrainer, batch: Batch) -> UpdateReport:
        report = original(self, batch)
        state = self.state()
        name = next(name for name in state if name.startswith("value/"))
        state[name].view(-1)[0] += 1e-3
        self.restore(state)
        return report

    monkeypatch.setattr(LocalTrainer, "update", update)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_where_training_again_comes_to_other_bits_the_recorded_weights_are_taken(
    tmp_path: Path, killed: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    made = killed('rollout.paradigm="synchronous"', lora=lora)
    recorded = rows(tmp_path / "run", "SELECT update_id, checksum FROM updates")
    nudged(monkeypatch)
    said = go_on(made, tmp_path / "run")
    assert any("version 4 was trained again with other bits; the recorded weights are taken" in text for text in said)
    assert rows(tmp_path / "run", "SELECT update_id, checksum FROM updates")[:4] == recorded
    assert list((tmp_path / "run" / "versions").iterdir()) == [], "what is finished needs none"
    assert rows(tmp_path / "run", "SELECT COUNT(*) FROM remade") == [(0,)]


def test_files_that_nothing_else_needs_any_more_serve_the_updates_that_are_trained_again(
    tmp_path: Path, killed: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(VersionFiles, "remove", lambda self, version: None)  # killed before any was removed
        made = killed('rollout.paradigm="synchronous"')
    half = tmp_path / "run" / "checkpoints" / ".000002.partial"
    half.mkdir(parents=True)
    nudged(monkeypatch)
    said = go_on(made, tmp_path / "run")
    taken = [text.split()[1] for text in said if text.endswith("the recorded weights are taken instead")]
    assert taken == ["1", "2", "3", "4"]
    assert not half.exists()
    assert list((tmp_path / "run" / "versions").iterdir()) == []


def test_versions_that_are_not_durable_are_trained_again(tmp_path: Path, killed: Callable[..., Recipe]) -> None:
    overrides = ["rollout.staleness=2", "rollout.in_flight=6", "rollout.max_tokens=30"]
    made = killed("runtime.durable_versions=false", *overrides, lora=False)
    assert not (tmp_path / "run" / "versions").exists()
    said = go_on(made, tmp_path / "run")
    assert any("updates 0 to 3 are trained again" in text for text in said)
    assert rows(tmp_path / "run", "SELECT COUNT(*) FROM remade") == [(0,)]


def test_where_nothing_has_the_recorded_weights_the_version_is_recorded_as_made_again(
    tmp_path: Path, killed: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = killed("rollout.staleness=2", "rollout.in_flight=6", "rollout.max_tokens=30")
    shutil.rmtree(tmp_path / "run" / "versions")
    nudged(monkeypatch)
    said = go_on(made, tmp_path / "run")
    assert any("nothing has the recorded weights" in text for text in said)
    (count,) = rows(tmp_path / "run", "SELECT COUNT(*) FROM remade")[0]
    assert count > 0


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_another_model_is_refused(tmp_path: Path, killed: Callable[..., Recipe], model: Path, lora: bool) -> None:
    made = killed(lora=lora)
    shutil.rmtree(tmp_path / "run" / "versions")
    other = tmp_path / "other"
    shutil.copytree(model, other)
    again = recipe(other, tmp_path, "training.steps=6", "evaluation.prompts=0", lora=lora)
    with pytest.raises(RunError, match=r"`model.path` is"):
        run(again, tmp_path / "run", resume=True)
    kept = {path: path.read_bytes() for path in model.glob("*.safetensors")}
    try:
        damage(model)
        with pytest.raises(RunError, match="the model is not the one that the run began with"):
            run(made, tmp_path / "run", resume=True)
        if lora:  # weights that are trained in full differ in version 0, which is what a replay is to find
            with pytest.raises(RunError, match="the model is not the one that the run began with"):
                retrain(tmp_path / "run")
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
    go_on(made, tmp_path / "run")


def test_what_is_under_way_keeps_its_prompts_and_other_columns_are_refused(
    tmp_path: Path, killed: Callable[..., Recipe]
) -> None:
    made = killed("rollout.staleness=2", "rollout.in_flight=9")
    assert rows(tmp_path / "run", "SELECT 1 FROM trajectories WHERE state NOT IN ('trained', 'failed')"), "under way"
    path = tmp_path / "prompts.jsonl"
    before = path.read_text()
    path.write_text(before.replace('"answer": ', '"answer": 7'))
    with pytest.raises(
        RunError, match=r"the data is not what the run in .* began with:\n  `prompts.jsonl` has changed"
    ):
        run(made, tmp_path / "run", resume=True)
    with sqlite3.connect(tmp_path / "run" / "journal.sqlite") as db:  # as a run that is older than this record
        db.execute("DELETE FROM run WHERE key = 'data'")
    with pytest.raises(RunError, match=r"the data is not what .* was \{'answer': \d+\} and is now \{'answer': 7\d+\}"):
        run(made, tmp_path / "run", resume=True)
    sessions = "SELECT session, outcome FROM sessions"
    assert rows(tmp_path / "run", sessions) == [(1, "failed")], "one that is refused is no session"
    path.write_text(before.replace("=", "?"))
    go_on(made, tmp_path / "run")
    assert rows(tmp_path / "run", sessions) == [(1, "failed"), (2, "finished")]
    assert retrain(tmp_path / "run").difference is None, "trained on what is recorded"


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(model, tmp_path, "training.steps=6", "evaluation.prompts=0", "runtime.checkpoint_seconds=0.000001")
    original, seen = LocalTrainer.capture, list[int]()

    def full(self: LocalTrainer) -> Callable[[Path], None]:
        write, version = original(self), self.version

        def fail(folder: Path) -> None:
            seen.append(version)
            if version >= 3:
                folder.mkdir()
                (folder / "half").write_text("...")
                raise OSError(28, "No space left on device")
            write(folder)

        return fail

    monkeypatch.setattr(LocalTrainer, "capture", full)

    class DiesLater(Heard):
        def updated(self, line: Mapping[str, Any]) -> None:
            if line["update"] == 4:
                raise KeyError("as if it were killed here")

    heard = DiesLater()
    with pytest.raises(KeyError):
        run(made, tmp_path / "run", observer=heard)
    assert max(seen) >= 3
    assert any("warning: " in text and "No space left on device" in text for text in heard.said)
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert left
    assert left[-1] in ("000001", "000002"), "the previous one is usable, and nothing half written is left"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert run(made, tmp_path / "run", resume=True)["steps"] == 6
    assert_verifies(tmp_path / "run")
    assert retrain(tmp_path / "run").difference is None


def test_a_version_that_finds_no_room_ends_the_run_and_it_goes_on_when_there_is(model: Path, tmp_path: Path) -> None:
    made = recipe(model, tmp_path, "training.steps=2", "evaluation.prompts=0", lora=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
        with pytest.raises(RunError, match=r"version 0 could not be written to .* continue with `--resume`"):
            run(made, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run(made, tmp_path / "run", resume=True)["steps"] == 2
    assert_verifies(tmp_path / "run")


def test_a_run_that_was_killed_before_it_had_anything_begins(model: Path, tmp_path: Path) -> None:
    made = recipe(
        model, tmp_path, "training.steps=1", "evaluation.prompts=0", "model.dtype=float32", "training.micro_tokens=8192"
    )
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(made.dumps())
    assert run(made, folder, resume=True)["steps"] == 1
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "config.toml").write_text(made.dumps())
    (folder / "journal.sqlite").touch()
    assert run(made, folder, resume=True)["steps"] == 1
    assert_verifies(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run, but for what SQLite makes and removes: its index, and a `-wal` file without commits."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith("-shm") and not (path.name.endswith("-wal") and _is_empty(path))
    }


def _is_empty(path: Path) -> bool:
    return path.stat().st_size == 0


def without_tables(journal: Path) -> None:
    journal.unlink()
    db = sqlite3.connect(journal)
    db.execute("PRAGMA journal_mode = WAL")
    db.close()


def without_the_run(journal: Path) -> None:
    journal.unlink()
    Journal.open(journal).close()


@pytest.mark.parametrize(
    ("trouble", "found"),
    [
        (Path.unlink, "does not exist"),
        (lambda journal: journal.write_bytes(b""), r"is empty \(0 bytes\)"),
        (without_tables, "has no tables"),
        (without_the_run, "has no run recorded in it"),
    ],
    ids=["missing", "empty", "no tables", "no run"],
)
def test_a_run_that_lost_its_journal_is_refused_and_left_as_it_is(
    tmp_path: Path, killed: Callable[..., Recipe], trouble: Callable[[Path], object], found: str
) -> None:
    made, folder = killed(), tmp_path / "run"
    kept = (folder / "journal.sqlite").read_bytes()
    trouble(folder / "journal.sqlite")
    before = contents(folder)
    with pytest.raises(RunError, match=rf"journal\.sqlite` {found}, but .*\n.*put the journal back .* `--out`"):
        run(made, folder, resume=True)
    assert contents(folder) == before
    (folder / "journal.sqlite").write_bytes(kept)
    go_on(made, folder)


def test_an_older_journal_is_refused_until_what_is_newer_is_out_of_the_folder(
    tmp_path: Path, killed: Callable[..., Recipe]
) -> None:
    folder, older = tmp_path / "run", tmp_path / "older.sqlite"

    class Copies(Dies):
        def updated(self, line: Mapping[str, Any]) -> None:
            if line["update"] == 1:
                with sqlite3.connect(folder / "journal.sqlite") as now, sqlite3.connect(older) as copy:
                    now.backup(copy)
            super().updated(line)

    made = killed(observer=Copies())
    for leftover in folder.glob("journal.sqlite-*"):  # SQLite would write what is in there into the older journal
        leftover.unlink()
    older.replace(folder / "journal.sqlite")
    with pytest.raises(RunError, match=r"(?s)has [12] finished updates?, but .*versions/.* to go on from what it has"):
        run(made, folder, resume=True)
    for name in ("versions", "metrics.jsonl"):
        (folder / name).rename(tmp_path / f"newer-{name}")
    go_on(made, folder)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_damaged_journal_is_refused_before_anything_is_built(
    tmp_path: Path, killed: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    made, path = killed(), tmp_path / "run" / "journal.sqlite"
    content = bytearray(path.read_bytes())
    at = int(len(content) * share) // 4096 * 4096
    content[at : at + 4096] = b"\x5a" * 4096
    path.write_bytes(content)
    before = contents(tmp_path / "run")
    monkeypatch.setattr(LocalComponents, "build", None)
    for again in (lambda: run(made, tmp_path / "run", resume=True), lambda: retrain(tmp_path / "run")):
        with pytest.raises(JournalError, match=r"journal\.sqlite` (is damaged|cannot be read).*put the journal back"):
            again()
    assert contents(tmp_path / "run") == before
    assert not is_alive(tmp_path / "run")


def test_the_journal_of_another_run_is_refused(tmp_path: Path, killed: Callable[..., Recipe]) -> None:
    made, folder = killed("seed=6"), tmp_path / "run"
    folder.rename(tmp_path / "another")
    made = killed()
    shutil.copy(tmp_path / "another" / "journal.sqlite", folder / "journal.sqlite")
    with pytest.raises(RunError, match=r"journal of another run than .*\n  `seed` is 6 in it, and 5 here\n"):
        run(made, folder, resume=True)


def test_an_evaluation_before_the_first_version_is_recorded_is_in_the_metrics_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, folder = recipe(model, tmp_path, "training.steps=1"), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "version_published", lambda *_, **__: None)  # killed before it was written
        patch.setattr(Journal, "evaluation", lambda *_, **__: None)
        patch.setattr(Journal, "version_loaded", Dies.killed)
        with pytest.raises(KeyError):
            run(made, folder)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    run(made, folder, resume=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["evaluation", "update", "evaluation"]


@pytest.mark.parametrize("recorded", [False, True], ids=["during it", "after it"])
def test_a_run_that_was_killed_in_its_last_evaluation_is_resumed_and_evaluated_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    class DiesAtTheEnd(Silent):
        def evaluated(self, result: EvaluationResult) -> None:
            if result.moment == "after":
                Dies.killed()

    episode = Evaluator._episode

    async def killed_in_the_middle(self: Evaluator, *args: Any) -> Any:
        reward = await episode(self, *args)
        return Dies.killed() if self.num_ended > 5 else reward  # an evaluation has four answers, two of them greedy

    made, folder = recipe(model, tmp_path, "evaluation.greedy=true"), tmp_path / "run"
    with monkeypatch.context() as patched:
        if not recorded:
            patched.setattr(Evaluator, "_episode", killed_in_the_middle)
        with pytest.raises(KeyError):
            run(made, folder, observer=DiesAtTheEnd())
    assert standing(folder) == "stopped"
    before = story(folder)
    summary = run(made, folder, resume=True)
    assert standing(folder) == "finished"
    assert story(folder) == before
    assert rows(folder, "SELECT kind FROM evaluations ORDER BY id") == [("before",), ("after",)]
    assert summary == json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["stopped"], summary["eval_after_version"]) == (3, False, 3)
    scores = [(each["score"], each["greedy"]["score"]) for each in summary["evaluations"]]
    assert None not in [score for pair in scores for score in pair]
    assert scores[0] == (summary["eval_before"], summary["eval_before_greedy"])
    assert scores[1] == (summary["eval_after"], summary["eval_after_greedy"])
    assert_verifies(folder)


def test_a_run_that_is_being_resumed_is_not_resumed_twice(
    tmp_path: Path, killed: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, build = killed(), LocalComponents.build

    def asked_again_meanwhile(*args: Any) -> LocalComponents:
        with pytest.raises(RunError, match="goes on in another process"):
            run(made, tmp_path / "run", resume=True)
        return build(*args)

    monkeypatch.setattr(LocalComponents, "build", asked_again_meanwhile)
    go_on(made, tmp_path / "run")
    assert not is_alive(tmp_path / "run")


def test_of_two_runs_that_begin_in_one_folder_the_second_leaves_the_first_as_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("training.steps=1", "evaluation.prompts=0", "model.dtype=float32")
    first, second = (recipe(model, tmp_path, f"seed={seed}", *options) for seed in (1, 2))
    folder, build = tmp_path / "run", LocalComponents.build

    built: list[int] = []

    def another_begins_meanwhile(recipe: Recipe, *args: Any) -> LocalComponents:
        built.append(recipe.seed)
        with pytest.raises(RunError, match="a process is starting a run in it; choose another `--out`"):
            run(second, folder)
        return build(recipe, *args)

    monkeypatch.setattr(LocalComponents, "build", another_begins_meanwhile)
    run(first, folder)
    assert built == [first.seed], "the second is refused before anything is built"
    assert load_recipe(folder / "config.toml").seed == first.seed
    assert not is_alive(folder)


def test_a_run_that_could_not_start_leaves_no_folder_behind(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "run"

    def fails(*_: Any) -> None:
        assert is_alive(folder)
        raise TrainerError("no memory")

    monkeypatch.setattr(LocalComponents, "build", fails)
    for made in (tmp_path / "new", None):  # the second time the parent is the user's own
        with pytest.raises(TrainerError):
            run(recipe(model, tmp_path), folder)
        assert not folder.exists()
        assert (tmp_path / "new").exists() == (made is None)
        (tmp_path / "new").mkdir(exist_ok=True)


def test_a_lock_whose_file_was_removed_is_not_held_by_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, opened = Lock(tmp_path / "journal.sqlite"), os.open

    def open_as_the_first_leaves(path: str, *rest: int) -> int:
        descriptor = opened(path, *rest)
        first.remove()
        return descriptor

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_as_the_first_leaves)
        second = Lock(tmp_path / "journal.sqlite")
    with pytest.raises(RunError, match="another process"):
        Lock(tmp_path / "journal.sqlite")
    second.close()


def test_a_run_that_was_killed_as_it_made_its_folder_left_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    Lock(folder / "journal.sqlite").close()
    (folder / "config.partial").touch()
    assert standing(folder) == "empty"


def test_files_agree_after_a_kill(tmp_path: Path, killed: Callable[..., Recipe]) -> None:
    made = killed("rollout.staleness=2", "rollout.in_flight=6")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "upd')  # killed as it wrote
    summary = run(made, tmp_path / "run", resume=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(6))
    recorded = [
        json.loads(text) for (text,) in rows(tmp_path / "run", "SELECT metrics FROM updates ORDER BY update_id")
    ]
    assert lines == recorded
    tokens = rows(tmp_path / "run", "SELECT SUM(num_tokens), COUNT(*) FROM completions JOIN members USING (trajectory)")
    assert tokens == [(summary["tokens"], summary["trained_trajectories"])]
    assert summary["length_ratio"] == 1.0
    assert sum(summary["staleness"]["histogram"].values()) == 72
    assert abs(summary["mismatch_kl"]) < 1e-6


# -- a batch that cannot be trained ------------------------------------------------------------------------------------


@pytest.fixture
def failed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """A run that ended in an update of its own, with the batch of that taken."""

    def make(*overrides: str) -> Recipe:
        original = LocalTrainer.update

        def failing(self: LocalTrainer, batch: Batch) -> UpdateReport:
            if batch.update == 2:
                raise RuntimeError("out of memory")
            return original(self, batch)

        made = recipe(model, tmp_path, "training.steps=6", "evaluation.prompts=0", *overrides)
        with monkeypatch.context() as patch:
            patch.setattr(LocalTrainer, "update", failing)
            with pytest.raises(TrainerError):
                run(made, tmp_path / "run")
        return made

    return make


@pytest.mark.parametrize("reward", [1e101, -1e39, 2e9])
def test_a_recorded_reward_that_cannot_be_trained_on_is_scored_again(
    tmp_path: Path, failed: Callable[..., Recipe], reward: float
) -> None:
    made = failed("rollout.staleness=2", "rollout.in_flight=6")
    with sqlite3.connect(tmp_path / "run" / "journal.sqlite") as db:  # as runs did before rewards had a bound
        ((wrong, was),) = db.execute(
            "SELECT trajectory, reward FROM trajectories WHERE state = 'training' ORDER BY trajectory LIMIT 1"
        ).fetchall()
        db.execute("UPDATE trajectories SET reward = ? WHERE trajectory = ?", (reward, wrong))
    heard = Heard()
    summary = run(made, tmp_path / "run", resume=True, observer=heard)
    assert f"trajectory {wrong} cannot be trained on and is scored again: the reward {reward:g} was" in str(heard.said)
    assert (summary["steps"], summary["trained_trajectories"], summary["scoring_retries"]) == (6, 72, 1)
    assert "returned and taken again: 1" in assert_verifies(tmp_path / "run")
    assert rows(tmp_path / "run", f"SELECT state, reward FROM trajectories WHERE trajectory = {wrong}") == [
        ("trained", was)
    ]
    assert retrain(tmp_path / "run").difference is None


def test_a_reward_that_cannot_be_trained_on_and_comes_again_fails_its_trajectory_alone(
    tmp_path: Path, failed: Callable[..., Recipe]
) -> None:
    made = failed("rollout.retries=0")
    with sqlite3.connect(tmp_path / "run" / "journal.sqlite") as db:
        ((wrong,),) = db.execute("SELECT MIN(trajectory) FROM trajectories WHERE state = 'training'").fetchall()
        db.execute("UPDATE trajectories SET reward = 1e101 WHERE trajectory = ?", (wrong,))
    summary = run(made, tmp_path / "run", resume=True)
    assert (summary["steps"], summary["trained_trajectories"], summary["failed_trajectories"]) == (6, 71, 1)
    assert_verifies(tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT trajectory, error FROM trajectories WHERE state = 'failed'") == [
        (wrong, "the reward 1e+101 was recorded, beyond 1e+09, the largest reward that can be trained on: scale the "
         "rewards")
    ]  # fmt: skip


def test_a_trajectory_that_no_update_can_be_trained_on_is_given_up_by_hand(
    tmp_path: Path, failed: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = failed()
    ((wrong,),) = rows(tmp_path / "run", "SELECT MIN(trajectory) FROM trajectories WHERE state = 'training'")
    original = LocalTrainer.update

    def failing(self: LocalTrainer, batch: Batch) -> UpdateReport:
        """As if the policy gave a token of it a probability of zero."""
        broken = [
            replace(sample, completion=replace(sample.completion, logprobs=sample.completion.logprobs * np.nan))
            if sample.trajectory == wrong
            else sample
            for sample in batch.samples
        ]
        return original(self, replace(batch, samples=broken))

    monkeypatch.setattr(LocalTrainer, "update", failing)
    for _ in range(2):
        hint = f"`--resume --give-up {wrong}` goes on without it"
        with pytest.raises(TrainerError, match=f"update 2 cannot be trained on trajectory {wrong} .*{hint}"):
            run(made, tmp_path / "run", resume=True)
    with pytest.raises(RunError, match="`--give-up 0`: the trajectory is `trained`"):
        run(made, tmp_path / "run", resume=True, give_up=[0])
    summary = run(made, tmp_path / "run", resume=True, give_up=[wrong])
    assert (summary["steps"], summary["trained_trajectories"], summary["failed_trajectories"]) == (6, 71, 1)
    assert_verifies(tmp_path / "run")
