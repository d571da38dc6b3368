r"""Writes problems of one task of the package reasoning-gym as files for `task.type = "file"`.

    python examples/reasoning_problems.py count_primes --out data/count_primes
    python examples/reasoning_problems.py chain_sum --config '{"min_terms": 8, "max_terms": 12}' --out data/sums

Writes `train.jsonl` and `test.jsonl`. Each row has `messages`, the problem with the request to reason and to put the
answer into `\boxed{}`, and `answer`, a number. `stretto.environments.rewards.mathematics:reward` scores completions, so
that the package is needed here alone, and not where the model is trained. The recipe's own task type `reasoning-gym`
needs no files, but asks for the answer without reasoning. No problem is in both files. Questions are left as they are:
some end with words such as "Give only the GCD as your final answer.", which then stand before our request.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
TRIES = 20  # problems drawn for each one that is kept, at most


class PreparationError(ValueError):
    """The problems cannot be written; the message says why and what to do."""


def draw_problems(task: str, config: Mapping[str, Any], seed: int, most: int) -> Iterator[tuple[str, str]]:
    """Yields (question, answer) of `most` problems."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1, cutoff=0.0)
        raise PreparationError(f"reasoning-gym has no task `{task}`; did you mean `{near[0]}`?")
    try:
        made = reasoning_gym.create_dataset(task, size=most, seed=seed, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise PreparationError(f"reasoning-gym makes no `{task}` with {json.dumps(dict(config))}: {error}") from error
    for entry in made:
        yield str(entry["question"]).strip(), str(entry["answer"]).strip()


def choose_rows(task: str, config: Mapping[str, Any], wanted: int, seed: int) -> list[dict[str, Any]]:
    """Returns the rows of the first `wanted` different problems whose answer is a number."""
    rows: dict[str, dict[str, Any]] = {}  # by their question
    draws = TRIES * wanted
    for question, answer in draw_problems(task, config, seed, draws):
        if NUMBER.fullmatch(answer) and question not in rows:
            rows[question] = {"messages": [{"role": "user", "content": question + INSTRUCTION}], "answer": answer}
        if len(rows) == wanted:
            return list(rows.values())
    if not rows:
        raise PreparationError(
            f"the answers of `{task}` are no numbers (one of {draws:,} is {answer[:40]!r}): choose another task, or "
            "use the task type `reasoning-gym` in the recipe, which scores texts"
        )
    raise PreparationError(
        f"`{task}` has {len(rows):,} different problems with a number as answer among {draws:,} draws; {wanted:,} are "
        "needed: lower `--train` or `--test`, or widen `--config`"
    )


def prepare(task: str, config: Mapping[str, Any], out: Path, *, train: int, test: int, seed: int) -> dict[str, int]:
    """Writes both files and returns how many rows each has. The held-out rows come first, so that they never change."""
    if out.exists() and not out.is_dir():
        raise PreparationError(f"`--out {out}` is a file; name a folder")
    rows = choose_rows(task, config, train + test, seed)
    parts = {"test": rows[:test], "train": rows[test:]}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for split, part in parts.items():
            lines = "".join(json.dumps(row) + "\n" for row in part)
            (out / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    except OSError as error:
        raise PreparationError(f"`--out {out}` cannot be written: {error.strerror}") from error
    return {split: len(part) for split, part in parts.items()}


def count(text: str) -> int:
    """Returns a typed number of problems."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is no whole number of at least 1")
    return int(text)


def task_options(text: str) -> dict[str, Any]:
    """Returns the typed options of a task."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(
            f"`{text}` is no JSON ({error}); write it as in --config '{{\"min_terms\": 8}}'"
        ) from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"`{text}` is no JSON object, such as '{{\"min_terms\": 8}}'")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="name of a task of reasoning-gym")
    parser.add_argument("--config", type=task_options, default={}, metavar="JSON", help="its options")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder of the two files")
    parser.add_argument("--train", type=count, default=4_000, metavar="COUNT", help="problems to train on")
    parser.add_argument("--test", type=count, default=512, metavar="COUNT", help="problems held out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        made = prepare(
            options.task, options.config, options.out, train=options.train, test=options.test, seed=options.seed
        )
    except ImportError:
        sys.stderr.write("error: the package reasoning-gym is not installed: `pip install 'stretto[reasoning-gym]'`\n")
        return 2
    except PreparationError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(f"{options.out}: {made['train']:,} problems to train on, {made['test']:,} held out")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
