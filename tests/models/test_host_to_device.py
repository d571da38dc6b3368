"""Copies of weights on a device: equal, and of their own."""

from __future__ import annotations

import pytest
import torch

from stretto.models import host_to_device
from stretto.models.host_to_device import copied_to_device

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_every_tensor_arrives_whole(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_to_device, "STAGE_BYTES", 1024)  # so that large ones take several turns
    tensors = {
        "large": torch.randn(37, 100),
        "half": torch.randn(700).to(torch.bfloat16),
        "turned": torch.randn(8, 9).t(),
        "one": torch.tensor(3.0),
        "none": torch.empty(0, 4),
        "there": torch.ones(5, device=device),
    }
    found = copied_to_device(tensors, torch.device(device))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].device.type == device
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].cpu(), tensor.cpu())
        if tensor.numel():
            assert found[name].data_ptr() != tensor.data_ptr()
