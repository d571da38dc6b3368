"""Adapters on disk: what is refused by name, and what merging computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stretto.errors import ModelError
from stretto.models.adapter_config import lora_of_adapter, read_adapter_config
from stretto.models.adapters import merge_adapter, read_adapter, refuse_another_base
from stretto.models.checksums import checksum
from stretto.models.loading import load_model
from stretto.models.lora import adapted_modules, inject_lora, lora_tensors, write_adapter
from stretto.models.lora_options import LoraOptions
from stretto.models.tiny import WarmStart, tiny_model

CPU, LORA = torch.device("cpu"), LoraOptions(rank=4)
PROMPT = torch.arange(2, 20)[None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", warm_start=WarmStart(steps=0))


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    """An adapter with values, and the logits of the model with it beside it."""
    policy: Any = load_model(str(model), torch.float32, CPU)
    base = checksum(dict(policy.named_parameters()))
    names = inject_lora(policy, LORA.rank, LORA.effective_alpha)
    with torch.no_grad():
        for number, name in enumerate(names):
            policy.get_submodule(name).lora_B.normal_(0, 0.1, generator=torch.Generator().manual_seed(number))
        save_file({"logits": policy(PROMPT).logits}, tmp_path / "logits.safetensors")
    write_adapter(
        tmp_path / "adapter", lora_tensors(policy, names), options=LORA, base=str(model), names=names,
        base_checksums={"float32": base},
    )  # fmt: skip
    return tmp_path / "adapter"


def edit(adapter: Path, **values: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_give_the_logits_of_the_adapter(model: Path, adapter: Path, dtype: torch.dtype) -> None:
    expected = load_file(adapter.parent / "logits.safetensors")["logits"]
    merged: Any = load_model(str(model), dtype, CPU)
    plain = merged(PROMPT).logits.float()
    merge_adapter(merged, read_adapter(adapter))
    difference = (merged(PROMPT).logits.float() - expected).abs().max()
    assert difference < (1e-4 if dtype == torch.float32 else 0.2)
    assert difference < 0.05 * (plain - expected).abs().max()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"peft_type": "IA3"}, "it is of type `IA3`"),
        ({"use_dora": True}, "`use_dora` is True: DoRA"),
        ({"use_rslora": True}, "`use_rslora`"),
        ({"bias": "all"}, "`bias` is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "`modules_to_save`"),
        ({"rank_pattern": {"q_proj": 8}}, "`rank_pattern`"),
        ({"layers_to_transform": [1]}, "`layers_to_transform`"),
        ({"target_modules": ".*q_proj"}, "`target_modules` is the pattern"),
        ({"r": "many"}, "is no configuration of an adapter"),
        ({"lora_alpha": -1}, "`lora_alpha` is -1"),
    ],
)
def test_an_adapter_with_features_that_are_not_supported_is_refused_by_name(
    adapter: Path, values: dict[str, Any], named: str
) -> None:
    edit(adapter, **values)
    with pytest.raises(ModelError, match=named):
        read_adapter_config(adapter)


def test_an_adapter_of_other_layers_or_shapes_is_of_another_base(model: Path, adapter: Path) -> None:
    merged = load_model(str(model), torch.float32, CPU)
    edit(adapter, target_modules=["q_proj"])
    with pytest.raises(ModelError, match=r"is of another base: it adapts `model\.layers.*`, which is not adapted here"):
        merge_adapter(merged, read_adapter(adapter))
    edit(adapter, target_modules="all-linear", r=8)
    with pytest.raises(ModelError, match=r"is of another base: .* has the shape \(4, .*the layer needs \(8,"):
        merge_adapter(merged, read_adapter(adapter))
    edit(adapter, r=4)
    tensors = load_file(adapter / "adapter_model.safetensors")
    first = next(iter(adapted_modules(merged)))
    save_file({k: v for k, v in tensors.items() if first not in k}, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=f"has nothing for the layer `{first}`"):
        merge_adapter(merged, read_adapter(adapter))
    save_file({**tensors, "base_model.model.lm_head.weight": torch.ones(1)}, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="`lm_head` is no part of a plain LoRA adapter"):
        read_adapter(adapter)


def test_the_checksum_of_the_base_decides_and_without_one_its_name(model: Path, adapter: Path) -> None:
    read = read_adapter(adapter)
    own = read.base_checksums["float32"]
    refuse_another_base(read, "elsewhere", own, torch.float32)
    refuse_another_base(read, "elsewhere", "of another type, which nobody recorded", torch.bfloat16)
    with pytest.raises(ModelError, match=r"is of another base than `model\.path = 'elsewhere'`: it was trained on"):
        refuse_another_base(read, "elsewhere", "0123", torch.float32)
    (adapter / "base_checksums.json").unlink()
    edit(adapter, base_model_name_or_path="Some/Base-1B")
    read = read_adapter(adapter)
    refuse_another_base(read, "models/base-1b", "0123", torch.float32)
    with pytest.raises(ModelError, match=r"it names `Some/Base-1B`, and `model\.path` is `models/base-7b`"):
        refuse_another_base(read, "models/base-7b", "0123", torch.float32)


def test_the_options_of_an_adapter_are_its_own_and_others_are_refused(adapter: Path) -> None:
    own = lora_of_adapter(str(adapter), {})
    assert (own["rank"], own["alpha"]) == (4, 8.0)
    assert lora_of_adapter(str(adapter), {"rank": 4, "targets": ()}) == own
    with pytest.raises(ValueError, match=r"`model\.lora\.rank = 8`, and the adapter in .* has 4; leave it out"):
        lora_of_adapter(str(adapter), {"rank": 8})
    with pytest.raises(ValueError, match=r"`model\.adapter = 'nowhere'`: `nowhere` holds no adapter"):
        lora_of_adapter("nowhere", {})
    assert lora_of_adapter("nowhere", own) == own, "the recorded recipe of a run"
