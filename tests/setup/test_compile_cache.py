"""Compiled code is kept between runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from stretto.setup import compile_cache
from stretto.setup.compile_cache import VARIABLES, cache_folder, keep_compiled
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
