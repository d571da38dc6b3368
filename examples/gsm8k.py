r"""Prepare GSM8K, 7,473 problems of school mathematics and 1,319 held out, as files for `task.type = "file"`.

    python examples/gsm8k.py                     # from the hub (`openai/gsm8k`), with the package `datasets`
    python examples/gsm8k.py --from FOLDER       # from the published `train.jsonl` and `test.jsonl`

Writes `data/gsm8k/train.jsonl` and `data/gsm8k/test.jsonl`. Each row has `messages`, the problem with the request to
put the answer into `\boxed{}`, and `answer`, the number alone. `recipes/gsm8k.toml` trains
on the rows, and `stretto.environments.rewards.mathematics` scores completions.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HUB = "openai/gsm8k"
SPLITS = ("train", "test")
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
MARK = "####"  # the answer follows it
OTHER_WAY = (
    "give the folder of the published `train.jsonl` and `test.jsonl` by `--from FOLDER`; with the model: "
    '`make qwen FROM="--packages --from FOLDER"`'
)


class PreparationError(ValueError):
    """The problems cannot be prepared; the message says why and what to do."""


def row_of(problem: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the row of one published problem. Errors name it `where`."""
    missing = [name for name in ("question", "answer") if not isinstance(problem.get(name), str)]
    if missing:
        raise PreparationError(f"{where}: there is no text `{missing[0]}`; this is not GSM8K as it was published")
    _, mark, answer = problem["answer"].rpartition(MARK)
    answer = answer.strip().replace(",", "")
    if not mark or not answer:
        raise PreparationError(f"{where}: `answer` has no number after `{MARK}`; this is not GSM8K as it was published")
    return {"messages": [{"role": "user", "content": problem["question"] + INSTRUCTION}], "answer": answer}


def read_folder(folder: Path, split: str) -> list[dict[str, Any]]:
    """Returns the rows of one published file."""
    path = folder / f"{split}.jsonl"
    try:
        with path.open(encoding="utf-8") as file:  # which ends no line at U+2028, as `splitlines` does
            lines = list(file)
    except OSError as error:
        raise PreparationError(f"`--from {folder}`: `{path}` cannot be read ({error.strerror})") from error
    rows = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            problem = json.loads(line)
        except json.JSONDecodeError as error:
            raise PreparationError(f"{where}: no JSON ({error})") from error
        if not isinstance(problem, dict):
            raise PreparationError(f"{where}: no JSON object")
        rows.append(row_of(problem, where))
    if not rows:
        raise PreparationError(f"{path}: the file is empty")
    return rows


def read_hub(split: str) -> list[dict[str, Any]]:
    """Returns the rows of one split of the set on the hub."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise PreparationError(
            f"the package `datasets` is not installed: `pip install datasets`, or {OTHER_WAY}"
        ) from error
    try:
        problems: Iterable[Mapping[str, Any]] = datasets.load_dataset(HUB, "main", split=split)
    except Exception as error:  # the hub's client raises many kinds of errors, mostly of the network
        raise PreparationError(
            f"`{HUB}` could not be loaded from the hub ({type(error).__name__}: {error}); {OTHER_WAY}"
        ) from error
    return [row_of(problem, f"{HUB}, {split}, row {number}") for number, problem in enumerate(problems)]


def prepare(out: Path, source: Path | None) -> dict[str, int]:
    """Writes both files, or neither if one cannot be read. Returns how many rows each has."""
    rows = {split: read_hub(split) if source is None else read_folder(source, split) for split in SPLITS}
    targets = {split: out / f"{split}.jsonl" for split in SPLITS}
    if source is not None and source.resolve() == out.resolve():
        raise PreparationError(f"`--out {out}` is the folder that `--from` names; choose another one")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for split, target in targets.items():
            target.write_text("".join(json.dumps(row) + "\n" for row in rows[split]), encoding="utf-8")
    except OSError as error:
        raise PreparationError(f"`--out {out}` cannot be written ({error.strerror}); name a folder") from error
    return {split: len(each) for split, each in rows.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, help="folder of the published files; default: the hub")
    parser.add_argument("--out", type=Path, default=Path("data/gsm8k"), help="folder to write; default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        counts = prepare(options.out, options.source)
    except PreparationError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(f"{counts['train']:,} problems and {counts['test']:,} held out in {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
