"""The command line: fast, and clear about what is wrong."""

import errno
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import tomli_w
from transformers import AutoModelForCausalLM, AutoTokenizer

import stretto.assembly.compare
from stretto.assembly import export
from stretto.cli import COMMANDS, _StandardError, main, make_parser
from stretto.cli.arguments import log_level, verbosity
from stretto.errors import RunError
from stretto.recipe.reading import load_recipe
from stretto.store.lock import Lock

RECIPE = '[model]\npath = "tiny"\nlora = { rank = 4 }\nwarm_start = { steps = 2 }\n[task]\ntype = "countdown-chain"\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def test_help_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, contextlib, stretto.cli\n"
        "with contextlib.suppress(SystemExit): stretto.cli.main(['--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout
    assert time.perf_counter() - started < 5.0, "a generous bound; the import check above is the real one"


def test_it_is_a_module_that_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "stretto", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"stretto {stretto.__version__}\n"), done.stderr


def test_every_command_has_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert f"usage: stretto {name} " in capsys.readouterr().out


def test_check_prints_the_resolved_recipe_and_its_memory_and_starts_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(recipe), "--set", "rollout.staleness=3"]) == 0
    out = capsys.readouterr().out
    assert "staleness = 3" in out
    assert 'paradigm = "multi-version"' in out, "defaults are spelled out"
    assert "memory: base" in out
    assert "4 version slots" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.toml"]


def test_a_bad_recipe_is_an_error_on_one_line_without_a_traceback(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe), "--set", "rollout.stalenes=3"]) == 2
    error = capsys.readouterr().err
    assert "did you mean `rollout.staleness`" in error
    assert "Traceback" not in error


def test_a_recipe_that_may_not_be_read_is_bad_input(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def close(method: str) -> None:
        real = getattr(Path, method)

        def refused(path: Path, *rest: Any, **named: Any) -> Any:
            if path == recipe:
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(path, *rest, **named)

        monkeypatch.setattr(Path, method, refused)

    for method in ("open", "exists"):  # the file itself, then a folder above it too
        close(method)
        for command in ("check", "train", "compare"):
            assert main([command, str(recipe)]) == 2
            assert "recipe.toml` cannot be read: Permission denied; name a TOML file" in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    path = tmp_path / "r.toml"
    path.write_text(f'[model]\npath = "{tmp_path / "empty"}"\n[task]\ntype = "countdown-chain"\n')
    assert main(["check", str(path)]) == 2
    assert "is no model" in capsys.readouterr().err
    assert main(["train", str(path), "--out", str(tmp_path / "run")]) == 2
    assert "is no model" in capsys.readouterr().err


def test_a_run_folder_that_exists_is_refused_and_left_alone(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("data")
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]


def test_there_must_be_a_run_to_resume(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--out", str(tmp_path / "none"), "--resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err


def test_giving_up_needs_a_run_to_resume(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--out", str(tmp_path / "new"), "--give-up", "3"]) == 2
    assert "`--give-up ID` needs `--resume`" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_resume_needs_the_folder_of_the_run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(recipe), "--resume"]) == 2
    assert "`--resume` needs `--out RUN`" in capsys.readouterr().err


def test_a_run_that_begins_needs_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "run")]) == 2
    assert "needs a RECIPE: name one, or continue a run with `--out RUN --resume`" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_verify_and_show_of_something_else_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "no run folder" in capsys.readouterr().err
    assert main(["show", str(tmp_path)]) == 2


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0", b"no journal at all\n" * 1000])
@pytest.mark.parametrize("words", [["verify"], ["show"], ["replay"], ["train"]], ids=lambda words: words[0])
def test_a_journal_that_is_none_is_an_error_by_its_name_and_no_broken_law(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], content: bytes
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        (run / name).write_text("")
    (run / "journal.sqlite").write_bytes(content)
    resume = [str(recipe), "--out", str(run), "--resume"]
    assert main([*words, *(resume if words == ["train"] else [str(run)])]) == 2
    said = capsys.readouterr().err
    assert f"`{run / 'journal.sqlite'}` " in said
    assert "put the journal back from a copy" in said
    assert (run / "journal.sqlite").read_bytes() == content


def test_a_fault_of_this_package_is_not_told_as_a_broken_law(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise KeyError("ours")

    monkeypatch.setattr("stretto.store.verify.verify", fails)
    assert main(["verify", str(tmp_path)]) == 2
    assert "KeyError: 'ours'" in capsys.readouterr().err.splitlines()[-1]


def test_compare_refuses_an_unknown_paradigm(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(recipe), "--paradigms", "synchronous,sideways", "--out", str(tmp_path / "c")]) == 2
    assert "`--paradigms` names `sideways`" in capsys.readouterr().err


SHORT = ["training.steps=2", "rollout.prompts=2", "rollout.group=2", "rollout.max_tokens=8", "evaluation.prompts=2"]


def settings() -> list[str]:
    chosen = [*SHORT, "runtime.engine_threads=1", "runtime.trainer_threads=1"]
    return [word for setting in chosen for word in ("--set", setting)]


def test_train_verify_and_show_follow_one_another(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    assert main(["train", str(recipe), *settings(), "--out", str(run)]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 updates done" in said
    assert "summary of the run" in said
    assert f"try next: stretto verify {run}" in said
    assert main(["verify", str(run)]) == 0
    assert "law 3  nothing old   holds" in capsys.readouterr().out
    assert main(["show", str(run), "--update", "1", "--samples", "2"]) == 0
    assert capsys.readouterr().out
    assert main(["train", str(recipe), *settings(), "--out", str(run), "--resume"]) == 2
    assert "is finished" in capsys.readouterr().err
    assert main(["train", str(recipe), *settings(), "--out", str(run)]) == 2
    assert "exists already; add `--resume` (`resume=True` in Python) and more" in capsys.readouterr().err

    assert main(["train", "--out", str(run), "--resume", "--set", "training.steps=3"]) == 0
    said = capsys.readouterr().out
    assert "from update 2 on: `training.steps` 2 -> 3\n" in said, "all that `--set` had changed is kept"
    assert "3 of 3 updates done" in said


class Gone(io.TextIOWrapper):
    """An output whose reader goes away after it has seen some words."""

    def __init__(self, path: Path, words: str) -> None:
        super().__init__(path.open("wb"), encoding="utf-8", write_through=True)
        self._words, self._is_gone = words, False

    def write(self, text: str) -> int:
        if self._is_gone:
            raise BrokenPipeError
        self._is_gone = self._words in text
        return super().write(text)


def test_a_run_whose_reader_is_gone_ends_as_by_sigpipe_and_goes_on_with_resume(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    train = ["train", str(recipe), *settings(), "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", Gone(tmp_path / "read", "reward: mean of the batch"))
        with pytest.raises(SystemExit) as ended:
            main(train)
    assert ended.value.code == 141, "1 is a broken law"
    assert main([*train, "--resume"]) == 0
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_a_command_whose_reader_is_gone_ends_as_by_sigpipe(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def says_much(_: object) -> int:
        sys.stdout.write("two")
        sys.stdout.write("lines")
        return 0

    monkeypatch.setattr("stretto.cli.check.run", says_much)
    monkeypatch.setattr(sys, "stdout", Gone(tmp_path / "read", "two"))
    assert main(["check", str(recipe)]) == 141


def test_the_policy_of_the_tiny_model_travels_with_its_base_and_says_how_it_was_asked(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["train", str(recipe), *settings(), "--out", str(tmp_path / "run")]) == 0
    shutil.rmtree(tmp_path / "cache")
    policy = tmp_path / "elsewhere"
    (tmp_path / "run" / "policy").rename(policy)
    base = AutoModelForCausalLM.from_pretrained(policy / "base")
    adapted = peft.PeftModel.from_pretrained(base, policy)
    tokens = AutoTokenizer.from_pretrained(policy)("4+3*2?", return_tensors="pt")
    assert adapted(**tokens).logits.shape[1] == 6
    readme = (policy / "README.md").read_text()
    assert "raw text" in readme
    assert "Paths are relative" not in readme, "its paths are whole"
    assert "PeftModel.from_pretrained(AutoModelForCausalLM" in readme
    assert not list(policy.rglob("chat_template.jinja")), "no prompt of the run went through it"
    modes = {path.stat().st_mode & 0o777 for path in policy.rglob("*") if path.is_file()}
    assert modes == {ordinary_mode(tmp_path)}


def test_the_readme_of_a_policy_says_where_its_paths_are_seen_from(recipe: Path) -> None:
    said = export.readme(Path("runs/mine/policy"), base="tiny", templated=False, with_base=True)
    assert f"Paths are relative to `{Path.cwd()}`" in said


def ordinary_mode(folder: Path) -> int:
    """The mode of a file that is written in the ordinary way."""
    path = folder / "ordinary"
    path.write_text("")
    return path.stat().st_mode & 0o777


def in_this_process(words: Sequence[str]) -> int:
    assert words[1:3] == ["-m", "stretto"]
    return main(words[3:])


def test_compare_runs_one_recipe_under_several_paradigms(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stretto.assembly.compare, "_train", in_this_process)
    recipe.write_text(recipe.read_text() + "[rollout]\nstaleness = 3\n[algorithm]\nclip_low = 0.3\n")
    folder = tmp_path / "compared"
    command = ["compare", str(recipe), *settings(), "--out", str(folder)]
    assert main([*command, "--paradigms", "synchronous,partial,multi-version"]) == 0
    said = capsys.readouterr().out
    assert "paradigms on the same recipe" in said
    rows = json.loads((folder / "compare.json").read_text())
    assert [(row["paradigm"], row["staleness_bound"]) for row in rows] == [
        ("synchronous", 0),
        ("partial", 3),
        ("multi-version", 3),
    ]
    assert {row["steps"] for row in rows} == {2}
    assert len({row["eval_before"] for row in rows}) == 1, "all begin with the same policy"
    for row in rows:
        assert main(["verify", str(folder / row["paradigm"])]) == 0
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "it holds runs; give one of them" in said
    assert all(f"`{folder / row['paradigm']}`" in said for row in rows)


def test_the_same_compare_goes_on_where_it_was_interrupted(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "compared"
    command = ["compare", str(recipe), *settings(), "--paradigms", "synchronous,drop", "--out", str(folder)]
    started: list[str] = []

    def interrupted_at_the_second(words: Sequence[str]) -> int:
        started.append(Path(words[4]).stem)
        if len(started) == 2:
            (folder / "drop").mkdir()
            begun = load_recipe(folder / "drop.toml", ["model.dtype=float32"])  # as it came out on this machine
            (folder / "drop" / "config.toml").write_text(begun.dumps())
            return 130
        return in_this_process(words)

    monkeypatch.setattr(stretto.assembly.compare, "_train", interrupted_at_the_second)
    assert main(command) == 130
    said = capsys.readouterr().out
    assert f"stretto {' '.join(command)}" in " ".join(said.split()), "the command that goes on, whole"
    assert "--resume" not in said
    assert [row["paradigm"] for row in json.loads((folder / "compare.json").read_text())] == ["synchronous"]

    started.clear()
    monkeypatch.setattr(
        stretto.assembly.compare, "_train", lambda words: started.append(words[4]) or in_this_process(words)
    )
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "synchronous: finished before" in said
    assert "drop: continued in" in said
    assert [Path(path).stem for path in started] == ["drop"]
    assert [row["paradigm"] for row in json.loads((folder / "compare.json").read_text())] == ["synchronous", "drop"]

    assert main(command) == 0, "all of it is there: the table again"
    assert len(started) == 1
    assert main([*command, "--set", "training.learning_rate=0.5"]) == 2
    said = capsys.readouterr().err
    assert "`training.learning_rate` is 0.5, and the run in" in said
    assert said.endswith("compare with the settings that it was started with, or choose another `--out`\n")


def test_a_paradigm_named_twice_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(recipe), "--paradigms", "drop,drop"]) == 2
    assert "`--paradigms` names `drop` more than once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "none.toml"], "`none.toml` does not exist"),
        (["train", "recipe.toml", "--set", "staleness=3"], "did you mean `rollout.staleness`"),
        (["train", "recipe.toml", "--out", "taken"], "exists already"),
        (
            ["train", "recipe.toml", "--out", "nothing", "--resume"],
            "to start one, leave `--resume` (`resume=True` in Python) out",
        ),
        (["train", "recipe.toml", "--out", "taken", "--resume"], "`taken` holds no run"),
        (["train", "recipe.toml", "--out", "taken", "--resume"], "or choose another `--out`"),
        (
            ["train", "recipe.toml", "--out", "dead"],
            "(`resume=True` in Python) to continue the run in it",
        ),
        (["train", "recipe.toml", "--out", "live"], "a process runs the run in it; choose another `--out`"),
        (["train", "recipe.toml", "--out", "live", "--resume"], "the run in `live` goes on in another process"),
        (
            ["train", "recipe.toml", "--out", "lost", "--resume"],
            "`lost/journal.sqlite` does not exist, but `lost/",
        ),
        (["train", "recipe.toml", "--out", "lost"], "`lost` exists already; choose another `--out`"),
        (["compare", "recipe.toml", "--out", "comparison"], "`comparison/drop/journal.sqlite` does not exist, but"),
        (["verify", "lost"], "the run in `lost` has no `journal.sqlite`: put the journal back from a copy"),
        (["show", "lost"], "the run in `lost` has no `journal.sqlite`: put the journal back from a copy"),
        (["pool", "taken", "--list"], "`taken` is no run folder"),
        (["pool", "nowhere", "--list"], "no run has begun in `nowhere` yet"),
        (["pool", "dead", "--list"], "the run in `dead` is not running"),
        (["compare", "recipe.toml", "--paradigms", "drop,drop"], "more than once"),
        (["compare", "recipe.toml", "--paradigms", ""], "`--paradigms ''` leaves a name empty"),
        (["compare", "recipe.toml", "--paradigms", "drop,"], "`--paradigms 'drop,'` leaves a name empty"),
        (["check", "recipe.toml", "--devices", "8x141GB"], "`devices` is '8x141GB': sizes are in GiB"),
        (["check", "recipe.toml", "--devices", "eight"], "which is not COUNTxSIZE"),
        (["compare", "recipe.toml", "--engines", "native,native"], "`--engines` names `native` more than once"),
        (["show", "dead", "--samples", "5"], "`--samples 5` has no effect without `--update N`"),
    ],
)
def test_mistakes_in_what_was_typed_are_told_before_torch_is_imported(
    recipe: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    for folder, name in (("taken", "file"), ("dead", "config.toml"), ("live", "config.toml")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("")
    for folder in ("lost", "comparison/drop"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("config.toml", "metrics.jsonl"):
            (tmp_path / folder / name).write_text("")
    lock = Lock(tmp_path / "live" / "journal.sqlite")
    code = (
        f"import sys, stretto.cli\nstatus = stretto.cli.main({arguments!r})\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    lock.close()
    assert done.returncode == 2, done.stderr
    assert words in done.stderr


def test_check_prints_what_a_run_would_use_where_the_recipe_says_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(recipe)]) == 0
    out = capsys.readouterr().out
    printed = tomllib.loads(out)
    assert printed["rollout"]["rows"] == 16 * 8
    assert printed["rollout"]["in_flight"] == 24
    assert printed["rollout"]["staleness"] == 2
    assert printed["model"]["lora"]["alpha"] == 8.0
    assert "all linear layers but the output layer" in out
    again = recipe.with_name("again.toml")
    again.write_text(out)
    assert load_recipe(again).plan == load_recipe(recipe).plan, "what it prints is a recipe of the same run"
    assert "scored by `stretto.environments.countdown:reward`" in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": "own_reward:rewrad"}, "did you mean `reward`?"),
        ({"reward": "own_reward:other"}, "missing a required argument: 'solution'"),
        ({"path": "holes.jsonl"}, "takes the column `answer`, which holes.jsonl:99 does not have"),
        ({"evaluation_path": "held.jsonl"}, "takes the column `answer`, which held.jsonl:4 does not have"),
        ({"path": "holes.jsonl", "reward": "own_reward:open"}, "takes the column `answer`, which holes.jsonl:99"),
        ({"path": "none.jsonl"}, "`none.jsonl` is not a file"),
        ({"path": "few.jsonl"}, "too few rows to hold any out"),
        ({"path": "long.jsonl"}, "its prompt has 5,000 tokens"),
    ],
)
def test_check_refuses_what_train_refuses_and_prints_no_configuration(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_reward.py").write_text(
        "def reward(prompt, completion, answer):\n    return 1.0\n"
        "def other(prompt, completion, solution):\n    return 1.0\n"
        "def open(prompt, completion, *, answer, **row):\n    return 1.0\n"
    )
    row = '{"prompt": "1+1=", "answer": 2}\n'
    (tmp_path / "rows.jsonl").write_text(row * 100)
    (tmp_path / "few.jsonl").write_text(row * 3)
    (tmp_path / "held.jsonl").write_text(row * 3 + '{"prompt": "1+2="}\n')
    (tmp_path / "holes.jsonl").write_text(row * 98 + '{"prompt": "1+2="}\n' * 2)
    (tmp_path / "long.jsonl").write_text(row * 99 + '{"prompt": "%s", "answer": 2}\n' % ("1" * 5000))
    task = {"type": "file", "path": "rows.jsonl", "reward": "own_reward:reward"}
    for number, (changed, status) in enumerate([({}, 0), (change, 2)]):
        path = tmp_path / f"{number}.toml"
        path.write_text(tomli_w.dumps({"model": {"path": "tiny"}, "task": {**task, **changed}}))
        assert main(["check", str(path)]) == status
        out, err = capsys.readouterr()
        assert bool(out) == (status == 0)
        assert status == 0 or words in err


def test_pool_says_what_is_wrong_before_it_asks_anybody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", str(tmp_path), "--add", "0"]) == 2
    assert "`--add 0` adds nothing" in capsys.readouterr().err
    assert main(["pool", str(tmp_path), "--add", "1000"]) == 2
    assert "`--add 1000` is more than 64 at once" in capsys.readouterr().err
    assert main(["pool", str(tmp_path), "--list"]) == 2
    assert "no run has begun in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed",
    [
        "show RUN --update",
        "show RUN --samples",
        "replay RUN --until",
        "pool RUN --add",
        "pool RUN --remove",
        "verify RUN --recompute",
        "train RECIPE --give-up",
    ],
)
@pytest.mark.parametrize("number", ["9223372036854775808", "9" * 301, "9" * 5_000])
def test_every_number_on_the_command_line_is_bounded(
    typed: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*typed.split(), number])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "is too large: give at most 1000000000000" in said
    assert len(said) < 1_000, "the number is shortened"


def test_a_home_that_the_shell_left_is_expanded_on_the_command_line_and_refused_by_name_in_a_recipe(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    assert main(["train", "~/recipe.toml", "--out=~/run"]) == 2
    assert f"`{tmp_path / 'run'}` exists already" in capsys.readouterr().err
    assert main(["verify", "~nobody-of-that-name/run"]) == 2
    assert "does not exist" in capsys.readouterr().err
    task = '{ type = "file", path = "~/rows.jsonl", reward = "examples.reward:names_the_capital" }'
    recipe.write_text(f'model.path = "tiny"\ntask = {task}\n')
    assert main(["check", str(recipe)]) == 2
    assert "`~` is not expanded" in capsys.readouterr().err


def test_a_signal_before_the_run_begins_stops_it_as_ctrl_c_does(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("stretto.cli.check.run", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert main(["check", str(recipe)]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_exception_of_any_kind_is_no_broken_law(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> int:
        raise BaseException("boo")

    monkeypatch.setattr("stretto.cli.check.run", fails)
    assert main(["check", str(recipe)]) == 2
    assert "BaseException: boo" in capsys.readouterr().err


def test_neither_an_error_nor_a_log_line_controls_the_terminal(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> int:
        raise RunError("`\x1b[2J`\nhelp")

    monkeypatch.setattr("stretto.cli.check.run", fails)
    assert main(["check", str(recipe)]) == 2
    assert capsys.readouterr().err == "error: RunError: `\\x1b[2J`\nhelp\n"
    record = logging.makeLogRecord({"msg": "file `%s`", "args": ("\x1b[2J",)})
    assert _StandardError().format(record) == r"file `\x1b[2J`"


def test_a_line_of_the_hub_appears_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, ours = logging.getLogger("huggingface_hub"), _Records()  # the library has a handler of its own
    monkeypatch.setattr(library, "propagate", True)
    logging.getLogger().addHandler(ours)
    try:
        library.getChild("utils").warning("before")
        main(["verify", str(tmp_path / "nowhere")])
        library.getChild("utils").warning("retrying")
    finally:
        logging.getLogger().removeHandler(ours)
    assert ours.seen == ["before"]


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ([], "warning"),
        (["-v"], "info"),
        (["-vv"], "debug"),
        (["-q"], "error"),
        (["--log-level", "info"], "info"),
    ],
)
def test_each_command_takes_how_much_it_says(words: list[str], level: str) -> None:
    for name in COMMANDS:
        arguments = {"list": [], "doctor": [], "completion": ["bash"], "pool": ["RUN", "--list"]}.get(name, ["X"])
        options, _ = make_parser().parse_known_args([name, *arguments, *words])
        assert log_level(options) == level
        again, _ = make_parser().parse_known_args([name, *arguments, *verbosity(options)])
        assert log_level(again) == level


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-q", "list", "runs"], "`-q` is an option of a command and goes behind it, such as `stretto list -q`"),
        (["--log-level", "debug", "list"], "`--log-level` is an option of a command and goes behind it"),
        (["lst", "runs"], "there is no command `lst`; did you mean `list`?"),
        (["fly"], "there is no command `fly`; the commands are train, check, "),
    ],
)
def test_a_first_word_that_is_no_command_is_told_with_what_to_type(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert told in capsys.readouterr().err


def test_quiet_and_verbose_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["list", "-q", "-v"])
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.usefixtures("clean_logging")
def test_a_quiet_run_prints_nothing_and_its_log_has_everything(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = ["--set", "training.steps=1", "--set", "rollout.prompts=2", "--set", "evaluation.prompts=2"]
    run = tmp_path / "run"
    logging.getLogger().handlers[:] = []  # pytest adds some for the call
    assert main(["train", str(recipe), *small, "--set", "rollout.max_tokens=8", "--out", str(run), "-q"]) == 0
    assert capfd.readouterr() == ("", "")
    log = (run / "run.log").read_text(encoding="utf-8")
    assert "INFO 1 of 1 updates done" in log
    assert "INFO evaluation of version 1" in log
    assert "INFO stretto.assembly.train: start: prompts: " in log
    assert "DEBUG" not in log


@pytest.mark.usefixtures("clean_logging")
def test_each_v_prints_more_of_a_run_on_the_terminal_and_into_its_log(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    logging.getLogger().handlers[:] = []  # pytest adds some for the call
    small = ["rollout.prompts=2", "evaluation.prompts=0", "rollout.max_tokens=8"]
    shared = ["train", str(recipe), "--out", str(run), *(word for key in small for word in ("--set", key))]
    assert main([*shared, "--set", "training.steps=2", "-vv"]) == 0
    told, log = capfd.readouterr().err, (run / "run.log").read_text(encoding="utf-8")
    for line in (
        "INFO stretto.assembly.train: start: data: ",
        "INFO stretto.assembly.train: start: files of the model: ",
        "INFO stretto.assembly.train: start: prompts: ",
        "INFO stretto.local.components: start: model, on cpu in float32: ",
        "INFO stretto.local.components: start: engines (1, with KV for ",
        "INFO stretto.local.components: start: trainer: ",
        "INFO stretto.run.loop: version 2 is published",
        "INFO stretto.assembly.checkpoint_writer: checkpoint of version 2: written in ",
        "DEBUG stretto.run.updates: update 1 takes 2 groups, ",
        "DEBUG stretto.run.group_start: ",
        "DEBUG stretto.run.version_loader: instance 0: load of version 0 took ",
        "DEBUG stretto.run.version_retention: version 0 is retired",
    ):
        assert line in told, line
        assert line in log, line
    logging.getLogger().handlers[:] = []
    assert main([*shared, "--set", "training.steps=3", "--resume", "-v"]) == 0
    told = capfd.readouterr().err
    assert "INFO stretto.assembly.resume: resumed after 2 updates: " in told
    assert "DEBUG" not in told


@pytest.fixture
def clean_logging() -> Iterator[None]:
    """The logging of a process that has just begun."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.slow
def test_a_tracker_that_hangs_keeps_neither_the_run_nor_its_process(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(
        "import atexit, time\n"
        "class Hangs:\n"
        "    def __init__(self): atexit.register(time.sleep, 600)\n"
        "    def on_update(self, line): time.sleep(600)\n"
    )
    overrides = ["training.steps=1", "rollout.prompts=2", "evaluation.prompts=0", "rollout.max_tokens=8"]
    overrides += ['observe.sinks=["hanging:Hangs"]', "observe.flush_seconds=0.5"]
    words = [each for override in overrides for each in ("--set", override)]
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "train", str(recipe), *words, "--out", "run"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the tracker `hanging:Hangs` was not done 0.5 s after the run; it is abandoned" in done.stderr
    assert "the trained policy is in run/policy" in done.stdout
