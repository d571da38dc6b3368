"""Weights that are loaded in float16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stretto.errors import ModelError
from stretto.models.float16_range import narrow_weights, range_hint
from stretto.models.loading import load_model
from stretto.models.tiny import random_model

CPU = torch.device("cpu")
NAME = "model.layers.0.mlp.up_proj.weight"


def saved(folder: Path, change: Any, dtype: torch.dtype) -> str:
    model = random_model().to(dtype)
    with torch.no_grad():
        change(model.get_parameter(NAME))
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_float16_is_the_one_that_transformers_loads(
    tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path, lambda weight: None, dtype)
    ours: Any = load_model(path, torch.float16, CPU)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16)
    assert ours.dtype == ours.config.dtype == torch.float16
    for find in ("named_parameters", "named_buffers"):
        one, other = dict(getattr(ours, find)()), dict(getattr(theirs, find)())
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert tensor.dtype == other[name].dtype, name
            assert torch.equal(tensor, other[name]), name
    assert ours.get_input_embeddings().weight is ours.get_output_embeddings().weight
    assert not caplog.records


def test_weights_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path, lambda weight: weight[0, 0].fill_(-70_000.0), torch.bfloat16)
    with pytest.raises(ModelError, match=rf"`model.path = .*`{NAME}` has values up to 7.*e\+04.*bfloat16"):
        load_model(path, torch.float16, CPU)
    load_model(path, torch.bfloat16, CPU)


def test_a_tensor_that_loses_values_to_zero_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path, lambda weight: weight[::2].fill_(1e-9), torch.float32)
    load_model(path, torch.float16, CPU)
    (record,) = caplog.records
    assert f"50.0 % of the values of `{NAME}` are too small for float16" in record.getMessage()


def test_zeros_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model()
    torch.nn.init.zeros_(model.get_parameter(NAME))
    narrow_weights(model, "this")
    assert not caplog.records


def test_only_float16_has_a_range_to_hint_at() -> None:
    assert "65,504" in range_hint(torch.float16)
    assert range_hint(torch.bfloat16) == range_hint(torch.float32) == ""
