r"""Writes problems of one task of the package reasoning-gym as files for `task.type = "file"`.

    python examples/reasoning_problems.py count_primes --out data/count_primes
    python examples/reasoning_problems.py chain_sum --config '{"min_terms": 8, "max_terms": 12}' --out data/sums

Writes `train.jsonl` and `test.jsonl`. Each row has `messages`, the problem with the request to reason and to put the
answer into `\boxed{}`, and `answer`, a number. `stretto.environments.rewards.mathematics:reward` scores completions, so
that the package is needed here alone, and not where the model is trained. The recipe's own task type `reasoning-gym`
needs no files, but asks for the answer without reasoning. No problem is in both files.
"""

from __future__ import annotations

import argparse
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
    """Yields (question, answer) of up to `most` problems, those whose answer is a number."""
    import reasoning_gym

    try:
        made = reasoning_gym.create_dataset(task, size=most, seed=seed, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise PreparationError(f"reasoning-gym makes no `{task}` with {json.dumps(dict(config))}: {error}") from error
    for entry in made:
        answer = str(entry["answer"]).strip()
        if NUMBER.fullmatch(answer):
            yield str(entry["question"]).strip(), answer


def prepare(task: str, config: Mapping[str, Any], out: Path, *, train: int, test: int, seed: int) -> dict[str, int]:
    """Writes both files and returns how many rows each has. The held-out rows come first, so that they never change."""
    wanted, seen, rows = train + test, set[str](), list[dict[str, Any]]()
    for question, answer in draw_problems(task, config, seed, TRIES * wanted):
        if len(rows) == wanted:
            break
        if question not in seen:
            seen.add(question)
            rows.append({"messages": [{"role": "user", "content": question + INSTRUCTION}], "answer": answer})
    if len(rows) < wanted:
        raise PreparationError(
            f"`{task}` has {len(rows):,} different problems with a number as answer among {TRIES * wanted:,} draws; "
            f"{wanted:,} are needed: lower `--train` or `--test`, or widen `--config`"
        )
    out.mkdir(parents=True, exist_ok=True)
    parts = {"test": rows[:test], "train": rows[test:]}
    for split, part in parts.items():
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (out / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return {split: len(part) for split, part in parts.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="name of a task of reasoning-gym")
    parser.add_argument("--config", type=json.loads, default={}, help="its options, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="folder of the two files")
    parser.add_argument("--train", type=int, default=4_000, help="problems to train on")
    parser.add_argument("--test", type=int, default=512, help="problems held out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if not isinstance(options.config, dict):
        parser.error(f"`--config {options.config}` is no JSON object")
    try:
        made = prepare(
            options.task, options.config, options.out, train=options.train, test=options.test, seed=options.seed
        )
    except ImportError:
        print("the package reasoning-gym is not installed: `pip install 'stretto[reasoning-gym]'`", file=sys.stderr)
        return 1
    except PreparationError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.out}: {made['train']:,} problems to train on, {made['test']:,} held out")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
