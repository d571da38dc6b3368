"""The tokens that end a text or a turn of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from stretto.models.hub import hub_options


def stop_tokens(model_path: str, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens that end a text, by the model's generation configuration and by its tokenizer."""
    try:
        generation = GenerationConfig.from_pretrained(model_path, **hub_options(model_path))
    except OSError:  # the model has no generation configuration
        generation = GenerationConfig.from_model_config(config)
    found = generation.eos_token_id
    tokens = set(found if isinstance(found, list | tuple) else [found]) | {tokenizer.eos_token_id}
    return tuple(sorted(token for token in tokens if token is not None))


def end_of_turn(tokenizer: Any, stops: Sequence[int]) -> int | None:
    """Returns the token that the chat template ends an assistant's turn with, if it is one of `stops`.

    Otherwise the tokenizer's own end of a text; None if there is none.
    """
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception:  # a template may raise anything; the chats themselves are checked elsewhere
            text = ""
        after = tokenizer.encode(text.rpartition("2")[2], add_special_tokens=False)
        if (found := next((token for token in after if token in stops), None)) is not None:
            return int(found)
    own = tokenizer.eos_token_id
    return own if own is not None else next(iter(stops), None)
