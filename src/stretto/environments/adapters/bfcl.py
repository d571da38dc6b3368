"""Function calls of BFCL, the Berkeley Function-Calling Leaderboard: its data, and rewards by its own checkers.

    python -m stretto.environments.adapters.bfcl --out data/bfcl

writes the tasks of a single turn whose functions are Python's, as rows for `[task] type = "file"` with
`reward = "stretto.environments.adapters.bfcl:reward"`. The reward is 1 if BFCL counts the calls as right, else 0.

| categories | right if |
|---|---|
| `simple_python`, `multiple`, `parallel`, `parallel_multiple`, and the same of `live_` | the checker takes the calls |
| `irrelevance`, `live_irrelevance` | nothing is called: no function fits |
| `live_relevance` | something is called |

The package pins old versions of many others. Its data and checkers need none of them, so install it without.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from stretto.chat.messages import ToolCall
from stretto.chat.tool_calls import parse_tool_calls
from stretto.environments.adapters.packages import optional_module
from stretto.errors import RecipeError, StrettoError

INSTALL = "pip install --no-deps bfcl-eval"
CHECKED = ("simple_python", "multiple", "parallel", "parallel_multiple")
LIVE_CHECKED = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
IRRELEVANT, RELEVANT = ("irrelevance", "live_irrelevance"), ("live_relevance",)
CATEGORIES = (*CHECKED, *LIVE_CHECKED, *IRRELEVANT, *RELEVANT)
EVALUATION_SHARE = 0.2

_OUR_NAME = "stretto"  # as a model of BFCL
_MODELS = "bfcl_eval.constants.model_config"
_END_OF_THINK = "</think>"


def reward(
    prompt: str,
    completion: str,
    *,
    category: str,
    functions: Sequence[Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]],
    **row: Any,
) -> float:
    """Returns 1 if BFCL counts the function calls in a completion as right, else 0."""
    calls = parse_tool_calls(completion.rpartition(_END_OF_THINK)[2]).calls
    readable = bool(calls) and all(_is_readable(call) for call in calls)
    if category in IRRELEVANT:
        return float(not readable)
    if category in RELEVANT or not readable:
        return float(readable)
    called = [{call.name: dict(call.arguments)} for call in calls if not isinstance(call.arguments, str)]
    check, python = _checker()
    try:
        result = check(list(functions), called, list(answers), python, category, _OUR_NAME)
    except (TypeError, AttributeError, LookupError, ValueError):  # values that the checker does not expect
        return 0.0
    return float(bool(result["valid"]))


def _is_readable(call: ToolCall) -> bool:
    return call.error is None and bool(call.name)


@lru_cache(maxsize=1)
def _checker() -> tuple[Callable[..., Any], Any]:
    """Returns BFCL's checker of calls, and its name for Python.

    The checker imports the settings of all models that BFCL knows, and with them the clients of a dozen vendors. It
    needs one: if the names of functions have their dots replaced. So it gets a module with that alone.
    """
    optional_module("bfcl_eval", package="bfcl-eval", install=INSTALL)
    ours = {_OUR_NAME: SimpleNamespace(underscore_to_dot=False)}
    settings = ModuleType(_MODELS)
    settings.MODEL_CONFIG_MAPPING = ours  # type: ignore[attr-defined]
    is_loaded = _MODELS in sys.modules
    sys.modules.setdefault(_MODELS, settings)
    try:
        checkers = optional_module("bfcl_eval.eval_checker.ast_eval.ast_checker", package="bfcl-eval", install=INSTALL)
    finally:
        if not is_loaded:
            del sys.modules[_MODELS]
    checkers.MODEL_CONFIG_MAPPING = {**checkers.MODEL_CONFIG_MAPPING, **ours}
    languages = optional_module("bfcl_eval.constants.enums", package="bfcl-eval", install=INSTALL)
    return checkers.ast_checker, languages.Language.PYTHON


# -- rows --------------------------------------------------------------------------------------------------------------


def rows(categories: Sequence[str] = CATEGORIES) -> Iterator[dict[str, Any]]:
    """Yields the rows of some categories: messages and tools, and what `reward` needs."""
    package = optional_module("bfcl_eval", package="bfcl-eval", install=INSTALL)
    types = optional_module("bfcl_eval.constants.type_mappings", package="bfcl-eval", install=INSTALL)
    folder = Path(package.__path__[0]) / "data"
    for category in categories:
        if category not in CATEGORIES:
            raise RecipeError(f"`{category}` is no category of BFCL that can be trained on; there are {CATEGORIES}")
        is_checked = category not in (*IRRELEVANT, *RELEVANT)
        found = _entries(folder / "possible_answer", category) if is_checked else ()
        answers = {entry["id"]: entry["ground_truth"] for entry in found}
        for entry in _entries(folder, category):
            yield {
                "id": entry["id"],
                "category": category,
                "messages": entry["question"][0],
                "tools": [_tool(function, types.GORILLA_TO_OPENAPI) for function in entry["function"]],
                "functions": entry["function"],
                "answers": answers[entry["id"]] if is_checked else [],
            }


def split(
    found: Sequence[dict[str, Any]], share: float = EVALUATION_SHARE
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Splits rows into those to train on and those to evaluate on. No set of functions is in both."""
    train: list[dict[str, Any]] = []
    evaluation: list[dict[str, Any]] = []
    for row in found:
        names = json.dumps(sorted(function["name"] for function in row["functions"]))
        place = int.from_bytes(hashlib.sha256(names.encode()).digest()[:8], "big") / 2**64
        (evaluation if place < share else train).append(row)
    return train, evaluation


def _entries(folder: Path, category: str) -> list[dict[str, Any]]:
    names = optional_module("bfcl_eval.constants.category_mapping", package="bfcl-eval", install=INSTALL)
    path = folder / f"{names.VERSION_PREFIX}_{category}.json"
    if not path.is_file():
        raise RecipeError(f"this version of bfcl-eval has no `{path}`: `{INSTALL} --upgrade`")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _tool(function: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    """Returns a function of BFCL as the OpenAI API describes functions."""
    parameters = {**_schema(function["parameters"], types), "type": "object"}
    described = {"name": function["name"], "description": function["description"], "parameters": parameters}
    return {"type": "function", "function": described}


def _schema(schema: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    """Returns a JSON schema whose types are those of JSON."""
    made = {**schema, "type": types.get(schema.get("type", "string"), "string")}
    if isinstance(schema.get("properties"), Mapping):
        made["properties"] = {name: _schema(part, types) for name, part in schema["properties"].items()}
    if isinstance(schema.get("items"), Mapping):
        made["items"] = _schema(schema["items"], types)
    return made


def _write(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found), encoding="utf-8")
    print(f"{path}: {len(found):,} rows")


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the rows to train on and those to evaluate on."""
    parser = argparse.ArgumentParser(prog="python -m stretto.environments.adapters.bfcl", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/bfcl"), help="folder (default: %(default)s)")
    parser.add_argument("--categories", nargs="+", choices=CATEGORIES, default=CATEGORIES, metavar="CATEGORY")
    parser.add_argument("--share", type=float, default=EVALUATION_SHARE, help="held out (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        train, evaluation = split([*rows(given.categories)], given.share)
    except StrettoError as error:
        parser.exit(1, f"{error}\n")
    _write(given.out / "train.jsonl", train)
    _write(given.out / "evaluation.jsonl", evaluation)


if __name__ == "__main__":
    main()
