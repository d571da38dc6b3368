"""Every command in the pages can be typed: the real parser takes its arguments, and what it names exists."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence

import pytest
from doc_pages import PAGES, ROOT, all_blocks, commands, is_recipe_key, lines_of_shell, name_of, spans

from stretto.cli import COMMANDS
from stretto.recipe.error_messages import sections
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import Recipe

SHIPPED = {path.stem for path in (ROOT / "recipes").glob("*.toml")}
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])
PLACEHOLDERS = {"N": "1", "M": "1", "ID": "1", "PORT": "1"}
# Programs of others, whose arguments nothing here knows.
OF_OTHERS = {
    ".", "cat", "cd", "curl", "docker", "export", "git", "head", "hf", "kill", "kubectl", "ls", "mkdir", "pgrep", "ray",
    "sleep", "ssh", "tail", "tensorboard", "wait",
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(message)


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    made = {}
    for name, command in COMMANDS.items():
        made[name] = Parser(prog=name, allow_abbrev=False)
        command.add_arguments(made[name])
        for option in ("-v", "-vv", "-q"):
            made[name].add_argument(option, action="store_true")
        made[name].add_argument("--log-level")
    return made


def parse(parsers: dict[str, argparse.ArgumentParser], arguments: Sequence[str]) -> None:
    """Parses what follows `stretto`, and loads its recipe with its overrides if there is such a recipe."""
    if arguments[0] in ("--version", "--help"):
        return
    if arguments[0] not in parsers:
        raise ValueError(f"`{arguments[0]}` is no command")
    options = parsers[arguments[0]].parse_args([PLACEHOLDERS.get(word, word) for word in arguments[1:]])
    overrides = getattr(options, "overrides", [])
    recipe = getattr(options, "recipe", None)
    if recipe is not None and (recipe.stem in SHIPPED or str(recipe).startswith("recipes/")):
        load_recipe(ROOT / "recipes" / f"{recipe.stem}.toml", overrides)
    for override in overrides:
        key = override.partition("=")[0]
        if key.lower() != "key" and not is_recipe_key(key):
            raise ValueError(f"`--set {override}`: a recipe has no such key")


def problems(parsers: dict[str, argparse.ArgumentParser], command: Sequence[str]) -> Iterator[str]:
    """Returns what is wrong with a command of a block."""
    program, *arguments = command
    program = program.removeprefix(".venv/bin/")
    if program == "stretto":
        try:
            parse(parsers, arguments)
        except ValueError as error:
            yield str(error)
    elif program == "make":
        missing = [word for word in arguments if "=" not in word and word not in TARGETS]
        if missing:
            yield f"`make {missing[0]}`: there is no such target"
    elif program == "pip":
        named = [extra for word in arguments for extras in re.findall(r"\[(.+)\]", word) for extra in extras.split(",")]
        if not set(named) <= EXTRAS:
            yield f"there is no extra {set(named) - EXTRAS}"
    elif program == "python":
        yield from missing_program(arguments)
    elif program not in OF_OTHERS:
        yield f"`{program}` is not known: add it to the test, or write what a reader types"


def missing_program(arguments: Sequence[str]) -> Iterator[str]:
    """A program of `python` is a module or a file of the repository, or a file that a page lets its reader save."""
    if arguments[0] == "-m" and arguments[1].partition(".")[0] in ("stretto", "docs"):
        path = arguments[1].replace(".", "/")
        if not any((ROOT / folder / f"{path}.py").exists() for folder in ("src", ".")):
            yield f"there is no module `{arguments[1]}`"
    elif arguments[0].endswith(".py"):
        saved = {block.title for block in all_blocks("python")}
        if not (ROOT / arguments[0]).exists() and arguments[0] not in saved:
            yield f"there is no file `{arguments[0]}`"


def test_every_command_of_a_block_can_be_typed(parsers: dict[str, argparse.ArgumentParser]) -> None:
    wrong = [
        f"{block.where}: {line.strip()}: {problem}"
        for block in all_blocks("sh")
        for line in lines_of_shell(block.code)
        for command in commands(line)
        for problem in problems(parsers, command)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_command_of_a_sentence_can_be_typed(parsers: dict[str, argparse.ArgumentParser]) -> None:
    wrong = []
    written = [page for page in PAGES if page.name != "command-line.md"]  # which is generated from the parser
    for page in written:
        for where, text in spans(page):
            if not re.match(r"(\.venv/bin/)?stretto [a-z-]", text):
                continue
            words = shlex.split(re.sub(r"[\[\]]|\.\.\.|\u2026", " ", text), comments=True)
            if len(words) == 2 and words[1] in parsers:
                continue  # the command by its name
            try:
                parse(parsers, words[1:])
            except ValueError as error:
                wrong.append(f"{where}: `{text}`: {error}")
    assert not wrong, "\n".join(wrong)


def test_every_recipe_key_of_a_sentence_exists() -> None:
    tables = "|".join(sections(Recipe))
    key = re.compile(rf"^\[?((?:{tables})(?:\.[a-z_]+)+)\]?(?: = .*)?$")
    wrong = []
    for page in PAGES:
        if page.parent.name == "coming-from":
            continue  # keys of other systems stand beside ours: `test_other_systems.py`
        for where, text in spans(page):
            found = key.match(text)
            if found and not is_recipe_key(found[1]) and not text.endswith(".py"):
                wrong.append(f"{where}: `{text}`")
    assert not wrong, "a recipe has no such key: " + "\n".join(wrong)


def test_every_make_target_of_a_sentence_exists() -> None:
    wrong = [
        f"{where}: `{text}`"
        for page in PAGES
        for where, text in spans(page)
        if (found := re.match(r"^make ([\w-]+)", text)) and found[1] not in TARGETS
    ]
    assert not wrong, "\n".join(wrong)


def test_every_file_of_a_sentence_exists() -> None:
    named = re.compile(r"^(?:docs|recipes|examples|src|tests|bench)/[\w./-]+\.(?:md|toml|py|jsonl|ipynb|json|svg|png)$")
    wrong = [
        f"{where}: `{text}`"
        for page in PAGES
        for where, text in spans(page)
        if named.match(text) and not (ROOT / text).exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_the_check_of_commands_finds_mistakes(parsers: dict[str, argparse.ArgumentParser]) -> None:
    for line in (
        "stretto trian recipes/quickstart.toml",
        "stretto train recipes/quickstart.toml --sets a=1",
        "stretto train recipes/quickstart.toml --set training.stepz=3",
        "A=1 stretto verify runs/x --recompute many 2> /dev/null",
        "make no-such-target",
        "pip install '.[no-such-extra]'",
        "python examples/none.py",
    ):
        (command,) = commands(line)
        assert list(problems(parsers, command)), line
    assert not is_recipe_key("rollout.stale")
    assert [name_of(page) for page in PAGES[:2]] == ["README.md", "docs/adapters.md"]
