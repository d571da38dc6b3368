"""Triton's interpreter, for kernels on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets interpreted kernels loop up to a loaded number, which numpy 2.4 does not convert as the interpreter does.

    Skips the test if there is neither a GPU nor the interpreter.
    """
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
