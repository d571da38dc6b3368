"""Whole runs of several tasks: their shares, their records, what is resumed, replayed and evaluated."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from interruption_cases import Stops, train_and_kill
from mixture_cases import KINDS, TASKS, mixture, write_kinds
from run_cases import assert_verifies, equal, policy, rows, run, story

import stretto
from stretto.assembly.check import _share_text
from stretto.assembly.retrain import retrain
from stretto.assembly.train import train
from stretto.cli import main
from stretto.environments.given import Given
from stretto.errors import RecipeError, RunError
from stretto.observe.progress import Silent
from stretto.observe.trackers.chosen_metrics import chosen
from stretto.recipe.reading import parse_recipe
from stretto.store.verify import exit_code, format_findings, verify
from stretto.view.api import Api
from stretto.view.runs import open_runs

SHARES = {"letters": 0.6, "guess": 0.3, "chain": 0.1}
TRAINED = (
    "SELECT task, COUNT(DISTINCT group_id) FROM members JOIN trajectories USING (trajectory) "
    "JOIN groups USING (group_id) WHERE use = 0 GROUP BY task"
)


def realised(folder: Path) -> dict[str, float]:
    counts = dict(rows(folder, TRAINED))
    return {label: count / sum(counts.values()) for label, count in counts.items()}


def worst(folder: Path, asked: Mapping[str, float] = SHARES) -> float:
    found = realised(folder)
    return max(abs(found.get(label, 0.0) - share) for label, share in asked.items())


def test_fifty_updates_have_the_shares_that_were_asked_for(model: Path, tmp_path: Path) -> None:
    summary = run(mixture(model, tmp_path, "training.steps=50", "rollout.group=2"), tmp_path / "run")
    text = assert_verifies(tmp_path / "run")
    assert "shares of tasks: letters 60.00%, guess 30.00%, chain 10.00%" in text
    assert worst(tmp_path / "run") < 0.02
    assert {label: own["groups"] for label, own in summary["tasks"].items()} == {
        "letters": 120, "guess": 60, "chain": 20,
    }  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "update"][-1]
    assert [last[f"task/{label}/share"] for label in SHARES] == pytest.approx([0.6, 0.3, 0.1])
    assert last["task/chain/epoch"] == pytest.approx(20 / 12), "each task has epochs of its own"
    assert sum(line.get("task/guess/groups", 0) for line in lines) == 60
    longest = rows(
        tmp_path / "run",
        "SELECT task, MAX(num_tokens) FROM completions JOIN trajectories USING (trajectory) JOIN groups "
        "USING (group_id) GROUP BY task",
    )
    assert dict(longest)["letters"] <= 8 < dict(longest)["guess"] <= 12, "limits of its own"
    assert retrain(tmp_path / "run").difference is None


def test_the_shares_of_what_is_trained_hold_with_a_filter_and_failures(model: Path, tmp_path: Path) -> None:
    made = mixture(
        model, tmp_path, "training.steps=20", 'rollout.filter="no-signal"', "rollout.retries=0", reward="often_solved"
    )
    run(made, tmp_path / "run")
    text = assert_verifies(tmp_path / "run")
    assert worst(tmp_path / "run") < 0.02, text
    drawn = Counter(task for (task,) in rows(tmp_path / "run", "SELECT task FROM groups"))
    lost = Counter(task for (task,) in rows(tmp_path / "run", "SELECT task FROM groups WHERE lost_before NOTNULL"))
    assert lost.total() > 0
    assert {label: drawn[label] - lost[label] for label in SHARES} == dict(rows(tmp_path / "run", TRAINED))


def test_a_synchronous_mixture_is_the_same_bit_for_bit(model: Path, tmp_path: Path) -> None:
    options = ('rollout.paradigm="synchronous"', "task.chain.order=pass-rate")
    for name in ("one", "other"):
        run(mixture(model, tmp_path, *options), tmp_path / name)
    drawn = "SELECT group_id, task, task_index, row_number FROM groups"
    assert rows(tmp_path / "one", drawn) == rows(tmp_path / "other", drawn)
    assert story(tmp_path / "one") == story(tmp_path / "other")
    assert equal(policy(tmp_path / "one"), policy(tmp_path / "other"))


def test_a_stopped_mixture_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    options = ('rollout.paradigm="synchronous"', "task.chain.order=pass-rate", "training.steps=8")
    run(mixture(model, tmp_path, *options), tmp_path / "whole")
    assert run(mixture(model, tmp_path, *options), tmp_path / "parts", observer=Stops(at=3))["stopped"]
    run(mixture(model, tmp_path, *options), tmp_path / "parts", resume=True)
    assert story(tmp_path / "parts") == story(tmp_path / "whole")
    assert_verifies(tmp_path / "parts")


@pytest.mark.slow
def test_a_killed_mixture_with_a_filter_is_resumed_and_extended(model: Path, tmp_path: Path) -> None:
    folder, options = tmp_path / "run", ('rollout.filter="no-signal"', "training.steps=200")
    mixture(model, tmp_path, reward="often_solved")
    train_and_kill(folder, options, num_updates=6)
    assert_verifies(folder)
    again = ('rollout.filter="no-signal"', "training.steps=30")
    assert run(mixture(model, tmp_path, *again, reward="often_solved"), folder, resume=True)["steps"] == 30
    assert_verifies(folder)
    assert worst(folder) < 0.02
    longer = ('rollout.filter="no-signal"', "training.steps=34")
    run(mixture(model, tmp_path, *longer, reward="often_solved"), folder, resume=True)
    assert_verifies(folder)
    assert retrain(folder).difference is None


def test_shares_change_when_a_run_is_resumed_and_tasks_do_not(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(mixture(model, tmp_path, "training.steps=10"), folder)
    changed = ("training.steps=30", "task.letters.share=0.2", "task.chain.share=0.5", "task.chain.oversample=4.0")
    run(mixture(model, tmp_path, *changed), folder, resume=True)
    assert "recipes of 2 phases" in assert_verifies(folder)
    (first,) = rows(folder, "SELECT first_group FROM phases WHERE phase = 1")[0]
    later = Counter(task for (task,) in rows(folder, f"SELECT task FROM groups WHERE group_id >= {first}"))
    assert later["chain"] / later.total() == pytest.approx(0.5, abs=0.02)
    assert retrain(folder).difference is None
    two = TASKS[: TASKS.rindex("[[task]]")]
    with pytest.raises(RunError, match=r"the tasks `letters`, `guess`, and the run in .* with the tasks `letters`, `g"):
        run(mixture(model, tmp_path, "training.steps=31", tasks=two), folder, resume=True)
    with pytest.raises(RunError, match=r"`task\.letters\.max_tokens` is 9, .* was started with 8: trajectories in"):
        run(
            mixture(model, tmp_path, "training.steps=31", *changed[1:], "task.letters.max_tokens=9"),
            folder,
            resume=True,
        )


EDITS = {
    "another label": (
        "UPDATE groups SET task = 'guess' WHERE group_id = 0", "by the shares of its phase 'letters' was next"
    ),
    "an unknown label": ("UPDATE groups SET task = 'other' WHERE group_id = 2", "which the run does not have"),
    "another place": ("UPDATE groups SET task_index = 9 WHERE group_id = 2", "is group 9 of task"),
    "a loss that was none": ("UPDATE groups SET lost_before = 4 WHERE group_id = 2", "is counted as lost and is not"),
    "another share": (
        "UPDATE phases SET recipe = REPLACE(recipe, 'share = 0.6', 'share = 0.01')", "by the shares of its phase"
    ),
    "a sample of another task": (
        "UPDATE groups SET task = iif(task = 'guess', 'chain', 'guess') WHERE group_id IN (SELECT MAX(group_id) FROM "
        "groups WHERE task <> 'letters')", "is not what update"
    ),
}  # fmt: skip


def test_an_edited_mixture_is_found(model: Path, tmp_path: Path) -> None:
    run(mixture(model, tmp_path), tmp_path / "run")
    for number, (edit, said) in enumerate(EDITS.values()):
        shutil.copytree(tmp_path / "run", copy := tmp_path / f"edit {number}")
        with sqlite3.connect(copy / "journal.sqlite") as db:
            db.execute(edit)
        findings = verify(copy)
        broken = [detail for finding in findings for detail in finding.details]
        assert exit_code(findings) == 1
        assert any(said in detail for detail in broken), format_findings(findings)


def test_every_task_is_evaluated_and_shown(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("evaluation.prompts=4", "evaluation.every=2", "evaluation.greedy=true")
    summary = run(mixture(model, tmp_path, *options), tmp_path / "run")
    found = stretto.open_run(tmp_path / "run")
    (before, *_, after) = found.evaluations()
    assert before["num_scored"] + before["num_failed"] == 12, "each task has as many"
    for line in (before, after):
        scores = [line[f"task/{label}/score"] for label in SHARES]
        assert line["score"] == pytest.approx(sum(scores) / 3)
        assert all(line[f"task/{label}/greedy_num_scored"] == 4 for label in SHARES)
    assert summary["tasks"]["guess"]["eval_after"] == after["task/guess/score"]
    samples = found.samples(task="guess")
    assert {row["task"] for row in samples} == {"guess"}
    assert 0 < len(samples) < len(found.samples())
    with pytest.raises(RunError, match=r"`task = 'gess'` is no task of .*: its tasks are 'letters', 'guess', 'chain'"):
        found.samples(task="gess")
    assert found.metrics()["task/letters/reward"][-1] is not None
    assert main(["show", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "held-out" in shown
    assert "letters" in shown
    assert main(["show", str(tmp_path / "run"), "--update", "5", "--samples", "16"]) == 0
    assert ", task " in capsys.readouterr().out
    assert_verifies(tmp_path / "run")
    two = rows(tmp_path / "run", "SELECT COUNT(DISTINCT prompt_index) FROM held_out")
    assert two == [(12,)]


def test_check_has_a_line_for_each_task(model: Path, tmp_path: Path) -> None:
    report = str(stretto.check(mixture(model, tmp_path, "task.guess.share=0.4")))
    assert "# task `letters`, 0.5455 of the groups, up to 8 tokens: `prompts.jsonl`: 24 prompts" in report
    assert "# task `guess`, 0.3636 of the groups, up to 12 tokens: guess: 40 prompts" in report
    assert report.count("[[task]]") == 3
    report = str(stretto.check(mixture(model, tmp_path, "task.guess.share=1e-9")))
    assert "# task `guess`, 1.429e-09 of the groups (none of the" in report


def test_shares_are_not_rounded_to_all_or_nothing() -> None:
    assert _share_text(0.25, 1_000) == "0.25 of the groups"
    assert _share_text(1 - 1e-9, 1_000) == "more than 0.9999 of the groups"
    assert _share_text(1e-9, 1_000) == "1e-09 of the groups (none of the 1,000 of this run; raise its `share`)"


def test_a_task_with_too_few_rows_is_refused_by_its_label(model: Path, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n' * 2)
    with pytest.raises(RecipeError, match=r"task `letters`: `evaluation\.prompts = 4`, but `few\.jsonl` has too few"):
        stretto.check(mixture(model, tmp_path, "evaluation.prompts=4", "task.letters.path=few.jsonl"))
    with pytest.raises(RecipeError, match=r"task `letters`: `none\.jsonl` is not a file"):
        stretto.check(mixture(model, tmp_path, "task.letters.path=none.jsonl"))
    few = str(stretto.check(mixture(model, tmp_path, "task.letters.path=few.jsonl", "rollout.prompts=16")))
    assert "task `letters`: `rollout.prompts = 16`, of which it has 9.6, is more than the 2 rows of" in few


def test_what_is_given_from_python_is_given_by_label(model: Path, tmp_path: Path) -> None:
    made = mixture(model, tmp_path)

    def vowels(prompt: str, completion: str, **row: Any) -> float:
        return sum(letter in "aeiou" for letter in completion) / 8

    data = [{"prompt": f"{number}?", "answer": number} for number in range(10)]
    given = {"reward": {"letters": vowels}, "data": {"letters": data}}
    finished = stretto.train(made, out=tmp_path / "run", progress=False, **given)  # type: ignore[arg-type]
    assert finished.outcome == "finished"
    assert_verifies(tmp_path / "run")
    assert 'path = "python:data@' in (tmp_path / "run" / "config.toml").read_text()
    longer = {"training.steps": 7}
    with pytest.raises(RunError, match="this was given from Python and cannot be found"):
        stretto.train(None, longer, out=tmp_path / "run", resume=True, progress=False)
    stretto.train(None, longer, out=tmp_path / "run", resume=True, progress=False, **given)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"several tasks, .*: give `reward` by label, such as `reward=\{'letters': "):
        stretto.check(made, reward=vowels)
    with pytest.raises(RecipeError, match="given for the task 'leters', which the recipe does not have; did you mean"):
        stretto.check(made, reward={"leters": vowels})
    with pytest.raises(
        RecipeError, match="`reward` is a dict; give a function; or, with several tasks, give `data` by label"
    ):
        stretto.check(made, reward={"letters": vowels}, data=data)
    single = {"model": {"path": str(model)}, "task": {"type": "file", "path": "prompts.jsonl", "reward": "a:b"}}
    with pytest.raises(RecipeError, match="given by label, for `letters`, and the recipe has one task"):
        stretto.check(single, reward={"letters": vowels})
    assert Given.of().is_nothing


def test_a_broken_reward_of_one_task_ends_the_run_with_its_reason(model: Path, tmp_path: Path) -> None:
    (tmp_path / "our_rewards.py").write_text(
        "def never(prompt, completion, answer):\n    raise ValueError('no idea')\n"
    )
    made = mixture(model, tmp_path, "training.steps=50", "rollout.retries=0", reward="never")
    with pytest.raises(stretto.StrettoError, match=r"the last of them, of task `letters`: .*no idea"):
        train(made, tmp_path / "run", observer=Silent())


def test_an_environment_of_one_task_that_cannot_be_made_is_named_with_the_label(model: Path, tmp_path: Path) -> None:
    made = mixture(model, tmp_path).model_dump(mode="json", exclude_unset=True)
    made["task"].append(
        {
            "type": "environment", "label": "world", "path": made["task"][0]["path"], "turns": 1, "workers": 0,
            "environment": "our_rewards:letters", "share": 0.1, "max_tokens": 8,
        }
    )  # fmt: skip
    with pytest.raises(stretto.StrettoError, match=r"task `world`: `task\.environment = 'our_rewards:letters'`"):
        train(parse_recipe(made), tmp_path / "run", observer=Silent())


def test_two_teachers_teach_a_task_each(model: Path, tmp_path: Path) -> None:
    teachers = f"[{{path='{model}', tasks=['letters']}}, {{path='{model}', tasks=['guess', 'chain'], coefficient=0.5}}]"
    run(mixture(model, tmp_path, f"algorithm={{type='distill', teachers={teachers}}}"), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = {key for line in lines if line["kind"] == "update" for key in line}  # not every batch has every task
    assert {"teacher_kl_0", "teacher_kl_1"} <= found
    assert_verifies(tmp_path / "run")
    assert retrain(tmp_path / "run").difference is None


def test_every_kind_of_task_is_mixed_each_with_its_own_processes(model: Path, tmp_path: Path) -> None:
    write_kinds(tmp_path)
    run(mixture(model, tmp_path, "training.steps=5", "evaluation.prompts=2", tasks=KINDS), tmp_path / "run")
    assert "scored 35.00%, played 30.00%, called 20.00%, guess 15.00%" in assert_verifies(tmp_path / "run")
    turns = rows(
        tmp_path / "run",
        "SELECT task, MAX(COALESCE(LENGTH(turns) / 8, 1)) FROM completions JOIN trajectories USING (trajectory) "
        "JOIN groups USING (group_id) GROUP BY task",
    )
    assert dict(turns)["scored"] == 1
    assert min(dict(turns)["played"], dict(turns)["called"]) > 1
    assert rows(tmp_path / "run", "SELECT reason FROM failures") == []
    assert retrain(tmp_path / "run").difference is None


def test_the_page_has_curves_and_a_filter_by_task(model: Path, tmp_path: Path) -> None:
    run(mixture(model, tmp_path, "evaluation.prompts=2"), tmp_path / "run")
    api = Api(open_runs([tmp_path / "run"]))
    try:
        curves = api.answer("curves", {"run": "0"})
        assert curves["tasks"] == list(SHARES)
        assert len(curves["updates"]["task/letters/reward"]) == 6
        assert set(curves["evaluations"][0]["tasks"]) == set(SHARES)
        found = api.answer("trajectories", {"run": "0", "task": "guess", "limit": "500"})
        assert {row["task"] for row in found["rows"]} == {"guess"}
        assert found["matching"] == len(found["rows"]) == 4 * dict(rows(tmp_path / "run", TRAINED))["guess"]
        assert api.answer("group", {"run": "0", "id": "0"})["task"] == "letters"
        answers = api.answer("answers", {"run": "0", "evaluation": "1", "task": "chain"})
        assert [row["task"] for row in answers["rows"]] == ["chain"] * 2
        asked = {"run": "0", "evaluation": "1", "index": str(answers["rows"][0]["index"]), "greedy": "0"}
        assert api.answer("answer", asked)["task"] == "chain"
        with pytest.raises(RunError, match="`task` is `gess`: give one of letters, guess, chain"):
            api.answer("trajectories", {"run": "0", "task": "gess"})
    finally:
        api.close()


@pytest.mark.slow
def test_a_mixture_is_compared_under_paradigms_and_with_other_runs(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture(model, tmp_path, "training.steps=2")
    command = ["compare", "recipe.toml", "--out", str(tmp_path / "all"), "--set", "training.steps=2"]
    assert main([*command, "--paradigms", "synchronous,multi-version"]) == 0
    run(mixture(model, tmp_path, "training.steps=2", "task.guess.share=0.5"), tmp_path / "other")
    one = next(path.parent for path in (tmp_path / "all").rglob("journal.sqlite"))
    compared = str(stretto.compare_runs([one, tmp_path / "other"]))
    assert "task.guess.share" in compared
    assert_verifies(one)
    capsys.readouterr()


def test_trackers_get_the_rewards_of_tasks() -> None:
    line = {
        "kind": "update",
        "update": 1,
        "task/math/reward": 0.5,
        "task/math/length": 3.0,
        "trainer_idle_seconds": 0.0,
    }
    assert chosen(line, "curated") == {"task/math/reward": 0.5}
    evaluation = {"kind": "evaluation", "version": 1, "score": 0.1, "task/math/score": 0.2, "task/math/num_scored": 3}
    assert chosen(evaluation, "curated") == {"score": 0.1, "task/math/score": 0.2}


@pytest.mark.parametrize(
    "options",
    [
        ('rollout.paradigm="drop"', "rollout.staleness=1", "rollout.in_flight=8"),
        ("rollout.redundancy={groups=6, members=5}",),
        ('rollout.paradigm="one-step-off"', "rollout.redundancy={groups=6}"),
        ('rollout.paradigm="partial"',),
        ("training.replay={ratio=0.5}",),
    ],
    ids=lambda options: options[0],
)
def test_shares_hold_where_groups_are_dropped_or_used_again(
    model: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    made = mixture(model, tmp_path, *options, "training.steps=20", "task.guess.wait_seconds=0.01")
    assert run(made, tmp_path / "run", observer=Stops(at=5))["stopped"]
    assert_verifies(tmp_path / "run")
    run(made, tmp_path / "run", resume=True)
    text = assert_verifies(tmp_path / "run")
    assert worst(tmp_path / "run") < 0.04, text
