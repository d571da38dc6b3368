"""One torch thread, for which exactness is claimed; the model that most tests share; Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import build
from vllm_cases import Children


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets interpreted kernels loop up to a loaded number, which numpy 2.4 does not convert as the interpreter does."""
    pytest.importorskip("triton")
    from triton.runtime import interpreter

    from stretto.engines.native.kernels.decode_work_list import _plan_kernel

    if not isinstance(_plan_kernel, interpreter.InterpretedFunction):
        if not torch.cuda.is_available():
            pytest.skip("kernels run on the CPU with TRITON_INTERPRET=1 alone")
        yield
        return
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
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
