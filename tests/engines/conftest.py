"""One torch thread, for which exactness is claimed; the model that most tests share; Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import build
from kernel_interpreter import interpreted_kernels
from vllm_cases import Children

from stretto.engines.native import decode


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def common_pages_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of tiny models read their common pages once too, although that saves few bytes."""
    monkeypatch.setattr(decode, "SHARED_BYTES", 0)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run on a GPU, or by Triton's interpreter."""
    with interpreted_kernels(monkeypatch):
        yield


@pytest.fixture(scope="session")
def model() -> Any:
    return build("qwen3")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model on disk, for engines that load it themselves; that of `model` may lie in storage of a native engine."""
    folder = tmp_path_factory.mktemp("model")
    build("qwen3").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def fake_children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    children = Children("fake_vllm_child", tmp_path_factory.mktemp("fake"))
    yield children
    children.close()


@pytest.fixture(scope="session")
def vllm_children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    """Children with the real vLLM, which take a minute to start: all tests share them."""
    children = Children("faulty_vllm_child", tmp_path_factory.mktemp("vllm"))
    yield children
    children.close()
