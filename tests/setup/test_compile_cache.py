"""Compiled code is kept between runs."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from stretto.setup import compile_cache
from stretto.setup.compile_cache import VARIABLES, cache_folder, delete_unused, keep_compiled
from stretto.setup.device import CUDA


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is as before at the end
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    return tmp_path


def test_a_gpu_has_a_folder_for_each_compiler(home: Path) -> None:
    keep_compiled(CUDA)
    for variable, name in VARIABLES.items():
        assert os.environ[variable] == str(cache_folder("NVIDIA H200") / name)
        assert Path(os.environ[variable]).is_dir()
    assert cache_folder("NVIDIA H200").is_relative_to(home)
    assert f"torch-{torch.__version__}" in cache_folder("NVIDIA H200").name
    assert cache_folder("NVIDIA H200") != cache_folder("NVIDIA A100")


def test_what_the_user_has_set_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    keep_compiled(CUDA)
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    assert "TORCHINDUCTOR_CACHE_DIR" in os.environ


def test_a_cpu_and_a_folder_that_cannot_be_made_change_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_compiled(torch.device("cpu"))
    file = home / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    keep_compiled(CUDA)
    assert not VARIABLES.keys() & os.environ.keys()


def test_a_folder_that_is_there_and_cannot_be_written_is_not_used(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = cache_folder("NVIDIA H200")
    folder.mkdir(parents=True)
    (folder / "triton").symlink_to("/proc")  # where not even the administrator can write
    keep_compiled(CUDA)
    assert not VARIABLES.keys() & os.environ.keys()
    (line,) = caplog.messages
    assert line.startswith("compiled code is kept in the temporary folder alone: ")


def test_a_user_without_a_home_has_torchs_own_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 3_999_999_999)
    with pytest.raises(RuntimeError):
        Path.home()
    keep_compiled(CUDA)
    assert not VARIABLES.keys() & os.environ.keys()
    (line,) = caplog.messages
    assert "home directory" in line


def aged(folder: Path, days: float) -> Path:
    (folder / "inductor").mkdir(parents=True, exist_ok=True)
    (folder / "inductor" / "code.py").write_text("")
    then = time.time() - days * 24 * 3600
    os.utime(folder, (then, then))
    return folder


def test_folders_that_no_run_has_used_for_sixty_days_are_deleted(home: Path) -> None:
    own = aged(cache_folder("NVIDIA H200"), 100)
    old, recent = aged(own.with_name("torch-1"), 61), aged(own.with_name("torch-2"), 59)
    left_behind = aged(own.with_name(".deleted-1"), 0)
    elsewhere = aged(home / "elsewhere", 100)
    own.with_name("link").symlink_to(elsewhere)
    keep_compiled(CUDA)
    assert not old.exists()
    assert not left_behind.exists()
    for folder in (own, recent, elsewhere):
        assert (folder / "inductor" / "code.py").exists(), folder
    assert time.time() - own.stat().st_mtime < 3600, "it is used now"


def test_a_folder_that_a_process_uses_is_not_deleted_however_old_it_is(home: Path) -> None:
    keep_compiled(CUDA)
    own = aged(cache_folder("NVIDIA H200"), 100)
    other = aged(own.with_name("torch-1"), 100)
    handle = os.open(other, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    delete_unused(own.parent)
    assert own.exists()
    assert other.exists()
    os.close(handle)  # as the end of its process does
    delete_unused(own.parent)
    assert own.exists()
    assert not other.exists()


def test_a_folder_that_is_deleted_as_a_run_starts_is_made_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = aged(cache_folder("NVIDIA H200"), 100)
    lock = fcntl.flock

    def late(handle: int, how: int) -> None:
        monkeypatch.setattr("fcntl.flock", lock)
        delete_unused(folder.parent)  # between the opening of the folder and its lock
        lock(handle, how)

    monkeypatch.setattr("fcntl.flock", late)
    keep_compiled(CUDA)
    assert sorted(each.name for each in folder.iterdir()) == sorted(VARIABLES.values())
    assert not (folder / "inductor" / "code.py").exists(), "it is another folder"
    assert list(folder.parent.iterdir()) == [folder]


def test_the_compiler_is_imported_beside_other_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_cache, "COMPILER", "wave")
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    compile_cache.import_compiler(torch.device("cpu"))()
    assert "wave" not in sys.modules
    compile_cache.import_compiler(torch.device("cuda"))()
    assert "wave" in sys.modules
    monkeypatch.setattr(compile_cache, "COMPILER", "no_such_compiler")
    with caplog.at_level("INFO"):
        compile_cache.import_compiler(torch.device("cuda"))()
    assert "`no_such_compiler` cannot be imported" in caplog.text
