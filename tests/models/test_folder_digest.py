"""The digest of a model's folder sees other weights, in large files too."""

from __future__ import annotations

from pathlib import Path

from stretto.models.folder_digest import BLOCK, BLOCKS, folder_digest


def test_other_bytes_sizes_and_names_give_another_digest(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    content = bytearray(3 * BLOCKS * BLOCK // 2)
    weights.write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    first = folder_digest(tmp_path)
    (tmp_path / "README.md").write_text("no part of the model")
    assert folder_digest(tmp_path) == first
    content[:] = bytes([1]) * len(content)
    weights.write_bytes(content)
    second = folder_digest(tmp_path)
    weights.write_bytes(content + b"more")
    third = folder_digest(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    assert len({first, second, third, folder_digest(tmp_path)}) == 4
