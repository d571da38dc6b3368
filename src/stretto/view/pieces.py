"""The text of single tokens, by the tokenizer of a run.

The journal has token ids, and the text of a whole completion. The tokenizer comes from the run folder, from the model's
folder, or from the caches of this machine; nothing is fetched. Without one the page shows ids.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

BROKEN = "\ufffd"  # stands for bytes that are no character yet
MOST_JOINED = 6  # tokens that one character may need
FILE = "tokenizer.json"
CONFIG = "config.toml"  # the recipe, in the run folder


class Pieces:
    """Turns tokens into the pieces of text that they add. Without a tokenizer, `of` returns None."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._tokenizer: Any = None
        self._known: dict[tuple[int, int], str] = {}
        if path is not None:
            from tokenizers import Tokenizer  # not before: it is needed only where tokens are shown

            self._tokenizer = Tokenizer.from_file(str(path))

    def of(self, tokens: Sequence[int]) -> list[str] | None:
        """Returns one text for each token. A character of several tokens is the piece of the last one."""
        if self._tokenizer is None:
            return None
        found: list[str] = []
        start = 0  # the first token of a character that is not whole
        for place in range(len(tokens)):
            piece = self._piece(tokens[start - 1] if start else -1, tokens[start : place + 1])
            if BROKEN in piece and place - start + 1 < MOST_JOINED and place + 1 < len(tokens):
                found.append("")
                continue
            found.append(piece)
            start = place + 1
        return found

    def _piece(self, before: int, tokens: Sequence[int]) -> str:
        """Returns the text that tokens add behind the token `before`: some decoders drop the space of a first one."""
        key = (before, tokens[0]) if len(tokens) == 1 else None
        if key is not None and key in self._known:
            return self._known[key]
        context = [before] if before >= 0 else []
        whole = str(self._tokenizer.decode([*context, *tokens], skip_special_tokens=False))
        head = str(self._tokenizer.decode(context, skip_special_tokens=False)) if context else ""
        piece = whole[len(head) :] if whole.startswith(head) else whole
        if key is not None:
            self._known[key] = piece
        return piece


def find_tokenizer(run_folder: Path, recipe: Mapping[str, Any]) -> Path | None:
    """Returns the `tokenizer.json` of a run: of its policy, its model's folder, or a cache; None if there is none."""
    name = str((recipe.get("model") or {}).get("path") or "")
    folders = [run_folder / "policy", run_folder / "policy" / "base"]
    if name in ("tiny", "tiny-moe"):
        folders += sorted(_stretto_cache().glob("tiny-*"))
    elif name:
        folders.append(Path(name).expanduser())
        folders += sorted((_hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots").glob("*"))
    for folder in folders:
        if (folder / FILE).is_file():
            return folder / FILE
    return None


def decoder_of_run(run_folder: Path) -> Callable[[Sequence[int]], str] | None:
    """Returns a function from tokens to text, special tokens included; None if no tokenizer of the run is here."""
    try:
        recipe = tomllib.loads((run_folder / CONFIG).read_text(encoding="utf-8"))
        path = find_tokenizer(run_folder, recipe)
        pieces = Pieces(path)
    except Exception:  # of a damaged file: the text is shown as it was recorded
        return None
    return None if path is None else lambda tokens: "".join(pieces.of(tokens) or ())


def _stretto_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "stretto"


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
