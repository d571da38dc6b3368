"""Demonstrations: prompts with the completions that a policy is to imitate before its run (`model.warm_start.path`).

A row has a column `prompt` or `messages`, as the rows of a task, and the answer in a column `completion` or as the last
message, of the assistant. Its prompt is rendered as that of a task. The completion is the text that the policy would
sample, with the token that ends its turn: if it begins with the `task.prefill`, which is part of the prompt, that is
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.chat.templates import prefill_of
from stretto.environments.data import PromptStream
from stretto.environments.row_faults import RowFaults
from stretto.environments.row_sources import found_files, read_files
from stretto.environments.rows import Row, make_rows
from stretto.errors import RecipeError

OPTION = "model.warm_start.path"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The tokens of a prompt and of its completion."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


def load_demonstrations(
    path: Path, tokenizer: Any, *, context: int, end: int | None, system: str | None = None
) -> list[Demonstration]:
    """Reads files of demonstrations. Raises `RecipeError`, which names the lines, for those that cannot be used.

    `context` is the most tokens of one, `end` the token that ends a turn. `system` is the system message of the task,
    which a demonstration without one gets too.
    """
    faults, prompts_of, completions = RowFaults(), list[tuple[str, Any]](), list[str]()
    for where, record in read_files(found_files(path, OPTION), OPTION, {}, faults):
        try:
            columns, completion = _split(record)
        except _BadDemonstrationError as error:
            faults.add(where, str(error))
        else:
            prompts_of.append((where, columns))
            completions.append(completion)
    rows = [_with_system(row, system) for row in make_rows(prompts_of, None, faults)]
    # Checks the roles and the lengths, and renders the prompts as those of the run.
    prompts = PromptStream(rows, tokenizer, seed=0, max_prompt_tokens=context - 1, shuffle=False, name=f"`{path}`")
    encode, prefill = tokenizer.encode, prefill_of(tokenizer.chat_template)
    made = []
    for number, (row, completion) in enumerate(zip(rows, completions, strict=True)):
        sampled = completion if row.messages is None else completion.removeprefix(prefill)
        tokens = tuple(encode(sampled, add_special_tokens=False))
        if end is not None and (not tokens or tokens[-1] != end):
            tokens = (*tokens, end)
        each = Demonstration(prompts.prompt(number).tokens, tokens)
        if len(each) > context:
            raise RecipeError(
                f"{row.where}: the demonstration has {len(each):,} tokens ({len(each.prompt):,} of its prompt), more "
                f"than the context of the model, {context:,}; shorten it, or remove the row"
            )
        made.append(each)
    return made


class _BadDemonstrationError(Exception):
    """A record that is no demonstration; its text follows the place of the record in a sentence."""


def _split(record: Any) -> tuple[dict[str, Any], str]:
    """Returns the columns of a record without its completion, and the completion."""
    if not isinstance(record, dict):
        raise _BadDemonstrationError(f"a row is an object with named columns, this is {type(record).__name__}")
    columns = dict(record)
    completion, messages = columns.pop("completion", None), columns.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    answered = isinstance(last, dict) and last.get("role") == "assistant"
    if completion is not None and answered:
        raise _BadDemonstrationError(
            "a demonstration has a `completion` or ends with a message of the assistant, and this has both"
        )
    if completion is None:
        if not answered:
            raise _BadDemonstrationError(
                "a demonstration has a column `completion`, or `messages` that end with one of the role "
                f"`assistant`; this has the columns {sorted(record)}"
                + (f", and its last message has the role {last.get('role')!r}" if isinstance(last, dict) else "")
            )
        assert isinstance(messages, list)
        assert isinstance(last, dict)
        completion, columns["messages"] = last.get("content"), messages[:-1]
    if not isinstance(completion, str):
        raise _BadDemonstrationError(f"the completion of a demonstration is text, this is {type(completion).__name__}")
    if not completion.strip():
        raise _BadDemonstrationError("the completion is empty; remove the row")
    return columns, completion


def _with_system(row: Row, system: str | None) -> Row:
    if system is None:
        return row
    messages = row.messages if row.messages is not None else ({"role": "user", "content": row.text or ""},)
    if messages[0]["role"] == "system":
        return row
    return replace(row, text=None, messages=({"role": "system", "content": system}, *messages))


def batches_of(num_rows: int, batch: int, steps: int, seed: int) -> Iterator[Sequence[int]]:
    """Yields the rows of each step: all rows in a random order, then all of them in another one, and so on."""
    import numpy as np

    order: list[int] = []
    epoch = 0
    for _ in range(steps):
        while len(order) < batch:
            order += np.random.default_rng([seed, epoch]).permutation(num_rows).tolist()
            epoch += 1
        yield order[:batch]
        order = order[batch:]
