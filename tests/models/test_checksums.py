import pytest
import torch

from stretto.models import checksums
from stretto.models.checksums import all_finite, checksum, fold_into, fold_into_reference

DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 5, 8_192, 20_001])
def test_the_kernel_folds_as_plain_torch_does(device, dtype, count):
    limits = torch.iinfo(dtype)
    values = torch.randint(limits.min, limits.max, (count,), dtype=dtype, device=device)
    ours, theirs = (torch.full((), 7, dtype=torch.int64, device=device) for _ in range(2))
    for start in (0, 3_000_000_000):
        fold_into(values, start, ours)
        fold_into_reference(values, start, theirs)
        assert int(ours) == int(theirs)


def test_it_does_not_depend_on_the_pieces_it_is_made_of(monkeypatch):
    tensors = {f"t{i}": torch.randn(17 * i + 1, 3) for i in range(9)} | {"half": torch.randn(50).bfloat16()}
    whole = checksum(tensors)
    for size in (1, 16, 64, 1000):
        monkeypatch.setitem(checksums.CHUNK, "cpu", size)
        assert checksum(tensors) == whole


def test_changes_that_a_weighted_sum_would_cancel_show():
    values = torch.randn(2048, 1024)  # sizes that are powers of two
    assert len({checksum({"a": values * factor}) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)}) == 5
    bits = values.clone().view(torch.int32)
    bits.view(-1)[5:9] += torch.tensor([1, -1, -1, 1], dtype=torch.int32)  # as rounding would
    assert checksum({"a": bits.view(torch.float32)}) != checksum({"a": values})
    bits.view(-1)[5:9] -= torch.tensor([1, -1, -1, 1], dtype=torch.int32)
    bits.view(-1)[700:703] += torch.tensor([1, -2, 1], dtype=torch.int32)
    assert checksum({"a": bits.view(torch.float32)}) != checksum({"a": values})


def test_a_view_has_the_checksum_of_its_copy():
    stored = torch.randn(6, 10)
    assert checksum({"b": stored.t()}) == checksum({"b": stored.t().contiguous()})


def test_an_infinite_value_is_found_in_any_tensor():
    tensors = [torch.randn(40), torch.randn(7, 7).half(), torch.randn(3)]
    assert all_finite(tensors)
    assert all_finite([])
    for bad in (float("inf"), float("nan")):
        for tensor in tensors:
            broken = [other.clone() for other in tensors]
            broken[[t is tensor for t in tensors].index(True)].view(-1)[-1] = bad
            assert not all_finite(broken)
