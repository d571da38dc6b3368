"""Compares the tokenizers of two models, whose log-probabilities of the same tokens are to be compared."""

from __future__ import annotations

from typing import Any

PROBE = "Two trains, 3.5 km apart:\n\n\tx = (12 + 7) * 2  # naïve 東京 🚆\r\n"
SHOWN = 3  # examples in a message


def shared_vocabulary(student: Any, teacher: Any) -> int:
    """Returns how many tokens at the beginning of the vocabulary a teacher shares with a student.

    Every token of the student must be one of the teacher, under the same number; the teacher may have more. Special
    tokens are tokens of the vocabulary too. Rows of an embedding beyond the tokenizer's last token do not count.
    Raises `ValueError` with the reason why the tokenizers are not those of one vocabulary.
    """
    own, other = student.get_vocab(), teacher.get_vocab()
    moved = sorted((token for token, index in own.items() if other.get(token, index) != index), key=own.__getitem__)
    if moved:
        shown = ", ".join(f"{token!r} is {own[token]} and {other[token]}" for token in moved[:SHOWN])
        raise ValueError(f"{len(moved):,} of {len(own):,} tokens have other numbers: {shown}")
    if missing := sorted(own.keys() - other.keys(), key=own.__getitem__):
        shown = ", ".join(map(repr, missing[:SHOWN]))
        raise ValueError(f"the teacher lacks {len(missing):,} of {len(own):,} tokens, such as {shown}")
    special = {token for token in _special(student) if token not in _special(teacher)}
    if special:
        raise ValueError(f"{min(special)!r} is a special token of the student and plain text of the teacher")
    ids = [each(PROBE, add_special_tokens=False)["input_ids"] for each in (student, teacher)]
    if ids[0] != ids[1]:
        raise ValueError("they split the same text into different tokens")
    return int(max(own.values())) + 1


def _special(tokenizer: Any) -> set[str]:
    """The tokens that a tokenizer treats as special: those that end, pad or separate texts, and other markers."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token) for token in added.values() if getattr(token, "special", False)}
