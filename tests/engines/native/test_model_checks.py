"""Checks of a model when an engine is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import build

from stretto.engines.native import model_checks
from stretto.engines.native.batched_linears import JoinedProduct
from stretto.engines.native.model_checks import PADDINGS, exact_padding, refuse_other_logits
from stretto.errors import ModelError


class Odd(torch.nn.Linear):
    """A layer whose rows depend on their number below `least`."""

    least = 0


@pytest.mark.parametrize(("least", "expected"), [(0, (8, True)), (12, (16, True)), (10_000, (64, False))])
def test_the_padding_is_the_smallest_with_which_rows_do_not_depend_on_their_number(
    least: int, expected: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Odd(16, 8, bias=False)

    def trials(layer: Any, generator: Any) -> Any:
        yield lambda x: x @ layer.weight.double().t().float() + (len(x) if len(x) < least else 0)

    monkeypatch.setattr(model_checks, "_trials", trials)
    assert exact_padding([layer, torch.nn.ReLU()], 100) == expected
    assert PADDINGS[-1] == 64


def test_products_of_this_machine_are_padded_to_be_exact() -> None:
    layers = [JoinedProduct(torch.nn.Linear(64, 32)), torch.nn.Linear(32, 48, bias=False)]
    padding, exact = exact_padding(layers, 64)
    assert exact
    x = torch.randn(64, 64)
    with torch.inference_mode():
        whole = layers[0](x)
        assert all(torch.equal(layers[0](x[:n].contiguous()), whole[:n]) for n in range(padding, 65))


@pytest.mark.parametrize(("dtype", "rounding", "fault"), [(torch.float32, 5e-4, 2e-3), (torch.bfloat16, 0.06, 0.2)])
def test_logits_may_differ_by_rounding_and_by_no_more(dtype: torch.dtype, rounding: float, fault: float) -> None:
    model = build("llama").to(dtype)
    theirs = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    size = theirs.abs().max()
    refuse_other_logits(model, theirs + rounding * size, theirs)
    with pytest.raises(ModelError, match="differ from the model's own by"):
        refuse_other_logits(model, theirs + fault * size, theirs)
