"""The pages of the documentation as data: their blocks of code, the commands in them, and their spans of code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stretto.recipe.error_messages import all_keys
from stretto.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_KEYS = all_keys(Recipe)
LANGUAGES = {"sh", "toml", "python", "json", "text", "html"}

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_WORDS_OF_SHELL = {"until", "do", "done", "then", "if", "fi", "!"}
_COMMANDS = {"stretto", "make", "pip", "python", "ray", ".venv/bin/stretto"}  # begin a block without a language


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str  # relative to the repository
    line: int  # of its first line of code
    language: str
    title: str | None  # the file that a reader saves it as
    code: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    """Returns a page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[Block]:
    """Returns the blocks of a page in order, of some languages or of all."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        language, _, rest = fence["info"].strip().partition(" ")
        code = re.sub(rf"^{fence['indent']}", "", fence["code"], flags=re.MULTILINE)
        if not language and name_of(page) == "README.md":  # GitHub alone renders it
            language = "sh" if code.split(None, 1)[0] in _COMMANDS else "text"
        title = _TITLE.search(rest)
        line = text.count("\n", 0, fence.start()) + 2
        found.append(Block(name_of(page), line, language, title[1] if title else None, code))
    return [block for block in found if not languages or block.language in languages]


def all_blocks(*languages: str) -> list[Block]:
    """Returns the blocks of all pages."""
    return [block for page in PAGES for block in blocks(page, *languages)]


def save(block: Block, folder: Path) -> Path:
    """Writes a block to the file of its title, as a reader would."""
    assert block.title is not None
    path = folder / block.title
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.code, encoding="utf-8")
    return path


_LABELLED = ("task.LABEL.", "task.chain.", "task.guess.")


def is_recipe_key(key: str) -> bool:
    """True for a key of a recipe, a table, and a key of a table without a schema, such as `task.config.size`.

    So is that of one of several tasks, if its label is `LABEL` or one of the shipped mixture.
    """
    free = ("task.config.", "task.columns.", "task.template.", "algorithm.options.")
    if key.startswith(_LABELLED):
        key = "task." + key.split(".", 2)[2]
    return key in _KEYS or any(name.startswith(f"{key}.") for name in _KEYS) or key.startswith(free)


def spans(page: Path) -> Iterator[tuple[str, str]]:
    """Returns where each span of code stands, and its text. Those of blocks and comments are left out."""

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    text = _COMMENT.sub(blank, _FENCE.sub(blank, page.read_text(encoding="utf-8")))
    for found in _SPAN.finditer(text):
        yield f"{name_of(page)}:{text.count(chr(10), 0, found.start()) + 1}", found[1]


def named_tests(page: Path) -> Iterator[tuple[str, str]]:
    """Returns the tests that a page names, each as (file, function)."""
    for _, text in spans(page):
        if found := re.fullmatch(r"(tests/[\w/]+\.py)::(test_\w+)", text):
            yield found[1], found[2]


def table_rows(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Returns the rows of the tables of a page, each with its line and its cells."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("| ") and line.endswith("|"):
            yield number, [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def lines_of_shell(code: str) -> list[str]:
    """Returns the lines of a block of shell, continued ones as one."""
    return [line for line in code.replace("\\\n", " ").split("\n") if line.strip() and not line.strip().startswith("#")]


def commands(line: str) -> list[list[str]]:
    """Returns the commands of a line of shell, without assignments, redirections and words such as `until`."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    found: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if skip or word in _WORDS_OF_SHELL:
            skip = False
        elif set(word) <= set("();|&"):
            found.append([])
        elif set(word) <= set("<>"):
            if found[-1] and found[-1][-1].isdigit():  # `2> file`
                found[-1].pop()
            skip = True
        elif found[-1] or not re.match(r"^\w+=", word):
            found[-1].append(word)
    return [command for command in found if command]
