"""The chat template that a task asks for: chosen, with the values of its variables and an opening of every answer.

All of it goes into the text of the template, which the tokenizer then carries. So prompts, environments, worker
processes, the endpoint and the exported policy write the same chat without being told any option again:

    {% if enable_thinking is not defined %}{% set enable_thinking = false %}{% endif %}   <- `template`
    ... the template itself ...
    {# prefill #}{% if add_generation_prompt %}{{ "<think>\\n" }}{% endif %}               <- `prefill`

A value that a caller gives to `apply_chat_template` goes before that of `template`.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stretto.errors import RecipeError

Template = str | Mapping[str, str]
"""The text of a template, or several by their names, of which the tokenizer chooses."""

_PREFILL = re.compile(r'\{# prefill #\}\{% if add_generation_prompt %\}\{\{ (".*") \}\}\{% endif %\}\Z', re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


def with_template(
    tokenizer: Any,
    *,
    chat_template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    prefill: str | None = None,
) -> Any:
    """Returns a tokenizer with the template that the options ask for; the same tokenizer if they ask for nothing.

    `chat_template` is a file, the name of one of the tokenizer's templates, or a template. `variables` are those of the
    template.
    `prefill` is written after the generation prompt. Raises `RecipeError` if an option cannot be used.
    """
    if chat_template is None and not variables and not prefill:
        return tokenizer
    found: Template | None = getattr(tokenizer, "chat_template", None)
    if chat_template is not None:
        found = _chosen(chat_template, found)
    if found is None:
        option = "template" if variables else "prefill"
        raise RecipeError(
            f"`task.{option}` is for a chat template, and the tokenizer of `model.path` has none: name a file with one "
            "in `task.chat_template`, or leave it out"
        )
    made = _changed(found, lambda text: _with_prefill(_with_variables(text, variables or {}), prefill or ""))
    _refuse_unread(found, variables or {})
    result = copy.copy(tokenizer)
    result.chat_template = made
    return result


def prefill_of(template: object) -> str:
    """Returns what a template writes after the generation prompt, if `with_template` added that; else nothing."""
    texts = template.values() if isinstance(template, Mapping) else [template]
    found = {_PREFILL.search(text) for text in texts if isinstance(text, str)}
    match = found.pop() if len(found) == 1 else None
    return "" if match is None else str(json.loads(match[1]))


def write_template(template: Template, folder: Path) -> None:
    """Writes a template into the folder of a tokenizer, as transformers reads it."""
    texts = {"default": template} if isinstance(template, str) else dict(template)
    for name, text in texts.items():
        path = folder / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _changed(template: Template, change: Callable[[str], str]) -> Template:
    if isinstance(template, str):
        return change(template)
    return {name: change(text) for name, text in template.items()}


def _chosen(asked: str, own: Template | None) -> str:
    """Returns the text of the template that a recipe names."""
    if any(mark in asked for mark in ("{{", "{%")):
        return asked
    said, path = f"`task.chat_template = {asked!r}`", Path(asked)
    names = sorted(own) if isinstance(own, Mapping) else []
    if not isinstance(own, str) and own is not None and asked in own:
        return own[asked]
    if not path.is_file():
        near = difflib.get_close_matches(asked, names, n=1)
        has = f"has the templates {', '.join(f'`{name}`' for name in names)}" if names else "has no named templates"
        raise RecipeError(
            f"{said} is no file, and the tokenizer of `model.path` {has}"
            + (f"; did you mean `{near[0]}`?" if near else "; name a file with a Jinja template")
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{said} cannot be read: {error}; it names a text file in UTF-8") from error
    if not text.strip():
        raise RecipeError(f"{said} is empty; it names a file with a Jinja template")
    return text


def _with_variables(text: str, variables: Mapping[str, Any]) -> str:
    for name in variables:
        if not _NAME.match(name) or name in _GIVEN:
            if name == "chat_template":
                raise RecipeError("`task.template.chat_template` is not a variable; did you mean `task.chat_template`?")
            given = "is given with every chat" if name in _GIVEN else "is no name of a variable"
            raise RecipeError(f"`task.template.{name}` cannot be set: `{name}` {given}; leave it out")
    head = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}"
        for name, value in variables.items()
    )
    guard = '{{ "" }}' if head and text.startswith("\n") else ""  # a line break right behind a block would be lost
    return head + guard + text


def _with_prefill(text: str, prefill: str) -> str:
    if not prefill:
        return text
    text = _PREFILL.sub("", text)  # of a policy that was trained with another
    text = text.removesuffix("\n")  # Jinja drops one line break at the end of a template
    return f"{text}{{# prefill #}}{{% if add_generation_prompt %}}{{{{ {_literal(prefill)} }}}}{{% endif %}}"


def _literal(value: Any) -> str:
    """Returns a value as Jinja writes it, which is JSON for all that TOML has."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return json.dumps(str(value), ensure_ascii=False)  # a date


def _refuse_unread(template: Template, variables: Mapping[str, Any]) -> None:
    """Raises `RecipeError` for a variable that no template reads: it would have no effect."""
    texts = [template] if isinstance(template, str) else list(template.values())
    for name in variables:
        if not any(re.search(rf"\b{name}\b", text) for text in texts):
            words = {word for text in texts for word in re.findall(r"[A-Za-z_][A-Za-z0-9_]{3,}", text)}
            near = difflib.get_close_matches(name, sorted(words), n=1, cutoff=0.7)
            hint = f"; did you mean `{near[0]}`?" if near else "; leave it out"
            raise RecipeError(f"`task.template.{name}` has no effect: the chat template reads no `{name}`{hint}")
