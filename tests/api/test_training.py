"""`stretto.train`: with functions and rows of a notebook, in threads and event loops, stopped and resumed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from api_cases import ROWS, Stops, letters, tables
from run_cases import assert_verifies, rows

import stretto
from stretto.cli import main
from stretto.errors import RecipeError, RunError
from stretto.observe.listeners import Callback, LiveRun
from stretto.recipe.schema import Recipe
from stretto.view.runs import RunSource


def local_letters() -> Any:
    """Returns a reward that no other process can import, as those of a notebook."""

    def exact(prompt: str, completion: str, answer: int) -> float:
        return letters(prompt, completion, answer)

    return exact


def other_letters() -> Any:
    """Returns a reward of the same name with another source."""

    def exact(prompt: str, completion: str, answer: int) -> float:
        return letters(prompt, completion, answer) / 2

    return exact


def recorded(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "config.toml").read_text())


def test_a_function_and_rows_of_a_notebook_make_a_run_like_any_other(model: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    run = stretto.train(
        tables(model),
        {"training.steps": 2, "rollout.temperature": 0.9},
        reward=local_letters(),
        data=(row for row in ROWS),
        out=tmp_path / "run",
        callbacks=[lines.append],
        progress=False,
    )
    assert (run.outcome, run.stopped, run.folder) == ("finished", False, tmp_path / "run")
    assert run.summary["steps"] == 2
    assert run.recipe.rollout.temperature == 0.9
    assert list(run.metrics()) == lines
    assert run.evaluations()["moment"] == ["before", "after"]
    task = recorded(run.folder)["task"]
    assert task["type"] == "file"
    assert task["reward"].startswith("python:exact@")
    assert task["path"].startswith("python:data@")
    assert run.verify().hold
    assert "proved: nothing that was trained on has changed" in str(run.verify())
    assert str(run.replay()) == "all 3 versions of 2 updates agree with what was recorded"
    assert main(["show", str(run.folder), "--update", "1"]) == 0
    for row in run.samples():
        assert row["reward"] == pytest.approx(letters(row["prompt"], row["text"], 0))


def test_a_stopped_run_is_resumed_with_the_same_functions_and_rows_and_by_nothing_less(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, folder = tables(model, training={"steps": 40, "learning_rate": 1e-3}), tmp_path / "run"
    stops, exact = Stops(), local_letters()
    run = stretto.train(recipe, reward=exact, data=ROWS, out=folder, callbacks=[stops], progress=False)
    assert run.stopped
    assert stretto.open_run(folder).stopped
    assert sum("`python:exact` cannot be imported by a worker process" in text for text in stops.messages) == 1

    assert main(["train", "--out", str(folder), "--resume"]) == 2
    said = capsys.readouterr().err
    assert "this was given from Python and cannot be found by its name" in said
    assert "use `stretto.train(..., reward=..., data=...)` with the same again" in said
    with pytest.raises(RunError, match=r"task\.path = 'python:data@"):
        stretto.train(recipe, reward=exact, out=folder, resume=True)
    with pytest.raises(RunError, match="`data` is not what the run began with: its rows, or their order, have changed"):
        stretto.train(recipe, reward=exact, data=ROWS[::-1], out=folder, resume=True)
    with pytest.raises(RunError, match=r"task\.reward` is 'python:<lambda>"):
        stretto.train(recipe, reward=lambda prompt, completion: 1.0, data=ROWS, out=folder, resume=True)

    stops = Stops(after=run.summary["steps"])
    again = stretto.train(reward=other_letters(), data=ROWS, out=folder, resume=True, callbacks=[stops], progress=False)
    assert again.summary["steps"] > run.summary["steps"] or again.stopped
    changed = (
        "the source of `python:exact` has changed since the run used it last: rewards are those of the new code now"
    )
    assert stops.messages.count(changed) == 1
    noted = "SELECT kind, text FROM notes WHERE kind LIKE '%changed'"
    assert rows(folder, noted) == [("source changed", changed)]
    assert_verifies(folder)


@pytest.mark.parametrize(
    ("error", "outcome", "cause"),
    [(RuntimeError, "failed", "RuntimeError: out of luck"), (KeyboardInterrupt, "stopped", None)],
)
def test_a_finished_run_whose_extension_ends_early_has_failed_or_was_stopped_by_every_name(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[BaseException],
    outcome: str,
    cause: str | None,
) -> None:
    options, reward = {"training.steps": 1, "evaluation.prompts": 0}, local_letters()
    run = stretto.train(tables(model), options, reward=reward, data=ROWS, out=tmp_path / "run", progress=False)
    outcomes, seen = list[str](), threading.Event()

    class Ends(Callback):
        def on_start(self, run: LiveRun) -> None:
            outcomes.append(stretto.open_run(run.folder).outcome)
            seen.set()

        def on_end(self, run: LiveRun) -> None:
            outcomes.append(run.outcome)

    async def ended(*_: Any, **__: Any) -> None:
        await asyncio.to_thread(seen.wait, 60.0)
        raise error("out of luck\nat length")

    monkeypatch.setattr("stretto.run.loop.Loop.run", ended)
    with pytest.raises(error):
        stretto.train(
            tables(model), options | {"training.steps": 2}, reward=reward, data=ROWS, out=run.folder, resume=True,
            callbacks=[Ends()], progress=False,
        )  # fmt: skip
    assert outcomes == ["running", outcome]
    opened = stretto.open_run(run.folder)
    assert (opened.outcome, opened.problem) == (outcome, cause)
    assert main(["list", str(tmp_path)]) == 0
    listed = capsys.readouterr().out.splitlines()[-1]
    assert f"  {outcome}  " in listed
    assert listed.endswith(cause or "")
    assert main(["show", str(run.folder)]) == 0
    said = f"{outcome}: {cause}" if cause else outcome
    assert f"1 of 2 updates, resumed once, {said}" in " ".join(capsys.readouterr().out.split())
    assert main(["verify", str(run.folder)]) == 0
    assert f"run {outcome}" in capsys.readouterr().out
    log = (run.folder / "run.log").read_text(encoding="utf-8")
    assert ("Traceback" in log) == (cause is not None)
    state = RunSource(run.folder).state()
    assert (state["condition"], state["sessions"][-1]["error"]) == (outcome, cause)


def test_a_function_of_a_module_gets_processes_of_its_own(model: Path, tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    try:
        import our_rewards  # type: ignore[import-not-found]

        run = stretto.train(
            tables(model), {"training.steps": 1}, reward=our_rewards.letters, data=ROWS, out=tmp_path / "run",
            progress=False,
        )  # fmt: skip
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("our_rewards", None)
    assert recorded(run.folder)["task"]["reward"] == "our_rewards:letters"
    assert run.verify().hold


def test_it_works_inside_a_running_event_loop_whose_interrupt_stops_the_run(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    async def cell() -> stretto.Run:
        return stretto.train(
            tables(model, training={"steps": 60}),
            reward=local_letters(),
            data=ROWS,
            out=folder,
            callbacks=[lambda line: os.kill(os.getpid(), signal.SIGINT) if line["update"] == 1 else None],
            progress=False,
        )

    try:
        run = asyncio.run(cell())
    finally:
        signal.signal(signal.SIGINT, before)
    assert run.stopped
    assert 2 <= run.summary["steps"] < 60
    assert run.verify().hold

    async def another() -> str:
        return str(stretto.check(tables(model), reward=local_letters(), data=ROWS))

    assert "scored by `python:exact` in the driver's process" in asyncio.run(another())


def test_an_interrupt_while_a_run_starts_in_a_running_event_loop_ends_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    async def interrupted(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    monkeypatch.setattr("stretto.assembly.train.evaluate_alone", interrupted)

    async def cell() -> None:
        stretto.train(tables(model), reward=local_letters(), data=ROWS, out=tmp_path / "run", progress=False)

    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(cell())
    finally:
        signal.signal(signal.SIGINT, before)
    assert stretto.open_run(tmp_path / "run").outcome == "stopped"


def test_it_works_in_a_thread_and_is_opened_and_stopped_from_another(model: Path, tmp_path: Path) -> None:
    folder, started = tmp_path / "run", threading.Event()
    live: list[Any] = []
    done: list[stretto.Run] = []

    class Begins(Callback):
        def on_start(self, run: LiveRun) -> None:
            live.append(run)

        def on_update(self, line: dict[str, Any]) -> None:
            started.set()

    def work() -> None:
        done.append(
            stretto.train(
                tables(model, training={"steps": 200}), reward=local_letters(), data=ROWS, out=folder,
                callbacks=[Begins()], progress=False,
            )
        )  # fmt: skip

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert started.wait(60)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    (run,) = live
    assert run.outcome == "running"
    opened = stretto.open_run(folder)
    assert opened.outcome == "running"
    assert len(opened.metrics()) >= 1
    assert opened.summary == {}
    assert stretto.compare_runs([opened])["outcome"] == ["running"]
    with pytest.raises(RunError, match="another process runs"):
        opened.stop()
    with pytest.raises(RunError, match="has no policy yet"):
        opened.policy()
    run.stop()
    thread.join(60)
    assert done[0] is run
    assert opened.stopped
    opened.stop()


class Letters:
    """An environment of two turns, of this test's process."""

    made = 0

    def __init__(self, tokenizer: Any, bonus: float = 0.0) -> None:
        type(self).made += 1
        self.tokenizer = tokenizer
        self.bonus = bonus
        self.threads: set[int] = set()

    async def episode(self, prompt: Any, policy: Any) -> float:
        self.threads.add(threading.get_ident())
        context = list(prompt.tokens)
        completion = await policy.generate(context)
        if policy.left > 2:
            context += completion.tokens.tolist()
            await policy.generate(context)
        return letters("", self.tokenizer.decode(completion.tokens.tolist()), 0) + self.bonus


@pytest.mark.parametrize("as_object", [True, False])
def test_an_environment_of_a_notebook_plays_episodes(model: Path, tmp_path: Path, as_object: bool) -> None:
    from stretto.models.loading import load_tokenizer

    Notebook = type("Notebook", (Letters,), {})  # noqa: N806
    environment = Notebook(load_tokenizer(str(model))) if as_object else Notebook
    run = stretto.train(
        tables(model, task={"type": "guess", "size": 9, "turns": 2}),
        {"training.steps": 1, "evaluation.prompts": 0, **({} if as_object else {"task.config": {"bonus": 0.5}})},
        environment=environment,
        data=ROWS,
        out=tmp_path / "run",
        progress=False,
    )
    task = recorded(run.folder)["task"]
    assert (task["type"], task["turns"]) == ("environment", 2)
    assert task["environment"].startswith("python:Notebook")
    assert run.verify().hold
    rewards = run.samples()["reward"]
    assert all(reward >= (0.0 if as_object else 0.5) for reward in rewards)
    assert Notebook.made == 1


def test_what_does_not_fit_together_is_refused_before_anything_is_built(model: Path, tmp_path: Path) -> None:
    exact, recipe = local_letters(), tables(model, task={"type": "countdown-chain"})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"reward": exact}, "`reward` alone does not make a task of `task.type = 'countdown-chain'`"),
        ({"data": ROWS}, "give `reward` or `environment` too"),
        ({"reward": exact, "data": []}, "`data` has no rows"),
        ({"reward": exact, "data": "rows.jsonl"}, "is a path: name a file in the recipe, as `task.path`"),
        ({"reward": exact, "data": ["2+2="]}, "row 1 of `data` is '2+2='; a row is a mapping"),
        ({"reward": exact, "data": {"prompt": "2"}}, "`data` is a dict; give rows, as a list of mappings"),
        ({"reward": 3, "data": ROWS}, "`reward` is 3, which cannot be called"),
        ({"reward": exact, "environment": Letters, "data": ROWS}, "an environment rewards its episodes itself"),
        ({"environment": Letters}, "`environment` needs rows"),
        ({"reward": exact, "data": ROWS, "resume": True}, "`resume` needs `out`"),
        ({"recipe": None, "reward": exact, "data": ROWS}, "`recipe` is None: give one"),
        ({"reward": exact, "data": ROWS, "callbacks": [3], "out": tmp_path / "new"}, "is no function and has none"),
        ({"reward": exact, "data": ROWS, "overrides": {"task.pass_env": ["HOME"]}}, "`task.pass_env` has no effect"),
        ({"overrides": {"training.stepz": 2}}, "stepz"),
    ]
    for arguments, words in cases:
        with pytest.raises(stretto.StrettoError) as raised:
            stretto.train(**{"recipe": recipe, "progress": False, **arguments})
        assert words in str(raised.value)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(RecipeError, match=r"alone makes no task, and the recipe has no `\[task\]`: give `data` too"):
        stretto.check(tables(model), reward=exact)
    with pytest.raises(stretto.StrettoError, match=r"write `def reward\(prompt, completion, \*\*row\)`"):
        stretto.check(tables(model), reward=lambda prompt: 1.0, data=ROWS)
    with pytest.raises(RecipeError, match="`reward` scores a task of one turn"):
        stretto.check(tables(model, task={"type": "environment"}), reward=exact, data=ROWS)


def test_a_recipe_is_a_path_tables_or_a_recipe_and_overrides_are_a_mapping_or_strings(
    model: Path, tmp_path: Path
) -> None:
    given = tables(model, task={"type": "countdown-chain", "size": 9})
    made = stretto.load_recipe(given, {"training.steps": 7, "model.lora": None, "rollout.stop": ["x"]})
    assert (made.training.steps, made.model.lora, made.rollout.stop) == (7, None, ("x",))
    assert stretto.load_recipe(made) == made
    assert stretto.load_recipe(made, ["training.steps=7"]) == made
    path = tmp_path / "recipe.toml"
    path.write_text(made.source_toml())
    assert stretto.load_recipe(path, {"training.steps": 8}).training.steps == 8
    assert isinstance(stretto.load_recipe(path), Recipe)
    for overrides, words in (
        ({"training.steps": 0}, "`training.steps = 0` on `the recipe`"),
        ({"training": 3}, "training"),
        ({"seed.deep": 3}, "`seed.deep = 3`: `seed` is a value, not a table"),
        ({"rollout.rows": None}, "removes `rollout.rows` from the recipe, and the recipe has no such key"),
        ({3: 4}, "is no dotted key"),
        ("training.steps=3", "give a mapping, or a list of such strings"),
    ):
        with pytest.raises(RecipeError) as raised:
            stretto.load_recipe(given, overrides)  # type: ignore[arg-type]
        assert words in str(raised.value)
