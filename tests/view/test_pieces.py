"""Pieces of text: the tokens of a completion side by side are its text, whatever bytes they cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stretto.view.pieces import Pieces, find_tokenizer


@pytest.fixture
def bytes_tokenizer(tmp_path: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize("text", ["plain words", "naïve 数学 🎼!", "a\n\nb", "<script>", "🎼"])
def test_pieces_join_to_the_text(bytes_tokenizer: Path, text: str) -> None:
    tokens = Tokenizer.from_file(str(bytes_tokenizer)).encode(text).ids
    pieces = Pieces(bytes_tokenizer).of(tokens)
    assert pieces is not None
    assert "".join(pieces) == text
    assert len(pieces) == len(tokens)


def test_the_space_of_a_word_belongs_to_its_piece(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁two": 0, "▁words": 1}, unk_token="▁two"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Pieces(tmp_path / "tokenizer.json").of([0, 1]) == ["two", " words"]


def test_without_a_tokenizer_there_are_no_pieces() -> None:
    assert Pieces(None).of([1, 2]) is None


def test_the_tokenizer_of_a_run_is_that_of_its_policy_or_its_model(
    tmp_path: Path, bytes_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, hub = tmp_path / "run", tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    assert find_tokenizer(run, {"model": {"path": "some/model"}}) is None
    kept = hub / "models--some--model" / "snapshots" / "1"
    kept.mkdir(parents=True)
    (kept / "tokenizer.json").write_text("{}")
    assert find_tokenizer(run, {"model": {"path": "some/model"}}) == kept / "tokenizer.json"
    assert find_tokenizer(run, {"model": {"path": str(tmp_path)}}) == bytes_tokenizer
    (run / "policy").mkdir(parents=True)
    (run / "policy" / "tokenizer.json").write_text("{}")
    assert find_tokenizer(run, {"model": {"path": str(tmp_path)}}) == run / "policy" / "tokenizer.json"
