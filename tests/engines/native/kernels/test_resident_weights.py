"""A version's tensors copied into a slot and folded there; on the CPU the kernels run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from stretto.engines.native.kernels import resident_weights as resident
from stretto.engines.native.kernels.resident_weights import DeviceResident, PlainResident, fits
from stretto.models.checksums import checksum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE, RANK, SLOTS = 1.5, 4, 3


def slot(dtype: torch.dtype, number: int = 1) -> dict[str, Tensor]:
    """The views of one slot as a fused decoder places them: `A` as rows of a larger matrix, `B` across."""
    views = {}
    for name, width, out in (("layers.2.up", 70, 1_500), ("layers.10.up", 70, 33), ("layers.1.up", 9, 1)):
        whole = torch.zeros(out + SLOTS * RANK, width, dtype=dtype, device=DEVICE)
        own = slice(number * RANK, (number + 1) * RANK)
        views[f"{name}.lora_A"] = whole[out:][own]
        views[f"{name}.lora_B"] = torch.zeros(SLOTS * RANK, out, dtype=dtype, device=DEVICE)[own].t()
    # Those of experts lie by expert and then by slot, with a rank that is padded.
    for leaf, width in (("lora_A", 12), ("lora_B", 30)):
        whole = torch.zeros(5, SLOTS, RANK + 3, width, dtype=dtype, device=DEVICE)[:, number, :RANK]
        views[f"layers.3.experts.{leaf}"] = whole if leaf == "lora_A" else whole.transpose(1, 2)
    return views


def version(views: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(view.shape, generator=generator).to(DEVICE, view.dtype) for name, view in views.items()}


def on_device(views: dict[str, Tensor]) -> DeviceResident:
    return DeviceResident(views, torch.cuda.Stream() if DEVICE == "cuda" else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block", [64, 4_096])
def test_both_ways_store_the_same_and_give_the_one_checksum(dtype, block, monkeypatch):
    monkeypatch.setattr(resident, "BLOCK", block)
    for make in (on_device, PlainResident):
        views = slot(dtype)
        place = make(views)
        for seed in range(2):  # a slot is used again and again
            tensors = version(views, seed)
            received = place.receive(tensors, SCALE)
            assert received.finite
            assert received.checksum == checksum(tensors, SCALE)
            assert all(torch.equal(views[name], tensors[name]) for name in views)


def test_the_checksum_is_of_what_is_resident_and_not_of_what_was_sent():
    views = slot(torch.bfloat16)
    views["layers.2.up.lora_A"] = views["layers.10.up.lora_A"]  # one place for two tensors cannot hold both
    tensors = version(views)
    for make in (on_device, PlainResident):
        assert make(views).receive(tensors, SCALE).checksum != checksum(tensors, SCALE)


def test_one_wrong_bit_and_two_values_exchanged_change_the_checksum():
    views = slot(torch.bfloat16)
    place, tensors = on_device(views), version(views)
    sent = place.receive(tensors, SCALE).checksum
    flipped = {**tensors, "layers.2.up.lora_B": tensors["layers.2.up.lora_B"].clone()}
    flipped["layers.2.up.lora_B"].view(torch.int16)[700, 2] ^= 1
    exchanged = {**tensors, "layers.10.up.lora_A": tensors["layers.10.up.lora_A"].flip(0).contiguous()}
    assert len({sent, *(place.receive(each, SCALE).checksum for each in (flipped, exchanged))}) == 3
    assert place.receive(tensors, 2 * SCALE).checksum != sent


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_value_that_is_not_finite_is_told_and_never_stored(value, dtype):
    for make in (on_device, PlainResident):
        views = slot(dtype)
        tensors = version(views)
        tensors["layers.2.up.lora_B"][1_499, 3] = value
        assert not make(views).receive(tensors, SCALE).finite
        assert all(bool(view.isfinite().all()) for view in views.values())


def test_the_largest_finite_values_are_finite():
    views = slot(torch.bfloat16)
    tensors = version(views)
    tensors["layers.1.up.lora_B"].fill_(-torch.finfo(torch.bfloat16).max)
    assert on_device(views).receive(tensors, SCALE) == (checksum(tensors, SCALE), True)


def test_tensors_of_a_host_or_with_gaps_arrive_too():
    views = slot(torch.bfloat16)
    tensors = version(views)
    gaps = {name: tensor.mT.contiguous().mT for name, tensor in tensors.items()}
    for sent in (gaps, {name: tensor.cpu() for name, tensor in tensors.items()}):
        assert on_device(views).receive(sent, SCALE).checksum == checksum(tensors, SCALE)


def test_it_takes_matrices_of_one_type_alone():
    matrix, wide, vector = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3)
    assert fits([matrix, matrix])
    assert not any(fits(views) for views in ([], [wide], [vector], [matrix, matrix.half()], [matrix, vector]))
