"""A reward model: its scores are those of transformers, whatever the batch; what is none is refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from stretto.environments.function_specs import SpecError
from stretto.environments.reward_calls import RewardSpec
from stretto.environments.reward_pool import RewardPool
from stretto.environments.rewards.reward_model_options import RewardModelOptions
from stretto.environments.scoring_errors import HaltError, ScoringError
from stretto.errors import RecipeError, RewardError
from stretto.models.reward_model import RewardModel
from stretto.models.tiny import tiny_tokenizer
from stretto.recipe.reading import parse_recipe
from stretto.setup.scorers import model_scorer

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
KINDS = {
    "llama": (LlamaForSequenceClassification, LlamaConfig),
    "qwen2": (Qwen2ForSequenceClassification, Qwen2Config),
}


def make(folder: Path, kind: str = "llama", *, template: bool = True, **changes: Any) -> Path:
    """Writes a random reward model with the tokenizer of the tiny model."""
    model_class, config_class = KINDS[kind]
    torch.manual_seed(3)
    values = {**SIZES, "num_labels": 1, "pad_token_id": 0, **changes}
    model_class(config_class(**values)).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Item:
    prompt: str
    completion: str
    messages: Any = None


LONG = "a longer answer, with more words in it" * 2
ITEMS = [Item("1+1", "2"), Item("What is it?", LONG), Item("", "x"), Item("a", "")]


def loaded(folder: Path, **options: Any) -> RewardModel:
    return RewardModel(RewardModelOptions(path=str(folder), **options), "cpu", "float32")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pad", [0, None])
def test_the_rewards_are_those_of_transformers_alone_and_in_a_batch(kind: str, pad: int | None, tmp_path: Path) -> None:
    folder = make(tmp_path / "model", kind, pad_token_id=pad)
    model = loaded(folder)
    together = model.score(ITEMS)
    direct = KINDS[kind][0].from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for item, reward in zip(ITEMS, together, strict=True):
        messages = [{"role": "user", "content": item.prompt}, {"role": "assistant", "content": item.completion}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = direct(input_ids=tokens).logits[0, 0].item()
        assert reward == pytest.approx(expected, abs=1e-5)
        assert model.score([item])[0] == pytest.approx(expected, abs=1e-5)
    assert len(set(together)) == len(ITEMS)
    assert model.model.config.pad_token_id == pad


def test_the_conversation_of_a_row_is_rendered_by_the_models_own_template(tmp_path: Path) -> None:
    model = loaded(make(tmp_path / "model"))
    model.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mark }}"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    tokens = model._encode("not this", "c", messages)
    assert model.tokenizer.decode(tokens) == "<system>s<user>q<assistant>c"


def test_options_of_the_template_are_passed_on(tmp_path: Path) -> None:
    model = loaded(make(tmp_path / "model"), template={"mark": "!"})
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mark }}"
    assert model.tokenizer.decode(model._encode("p", "c", None)) == "pc!"


def test_without_a_template_prompt_and_completion_are_plain_text(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", template=False)
    assert loaded(folder).tokenizer.decode(loaded(folder)._encode("1+1=", "2", None)) == "1+1=2"
    with pytest.raises(SpecError, match="has no chat template, and rows have `messages`"):
        RewardModel(RewardModelOptions(path=str(folder)), "cpu", "float32", columns={"messages": None})


def test_a_named_label_is_the_reward(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1}, num_labels=2)
    good, bad = (loaded(folder, label=label).score(ITEMS[:1])[0] for label in ("good", "bad"))
    assert good != bad
    with pytest.raises(SpecError, match="has 2 labels: name the one that is the reward, `label`: `bad`, `good`"):
        loaded(folder)
    with pytest.raises(SpecError, match="has no label `fine`; it has `bad`, `good`"):
        loaded(folder, label="fine")


def test_a_model_with_another_head_is_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES, num_labels=1)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="is no reward model") as caught:
        loaded(tmp_path)
    assert "needs `score.weight`" in str(caught.value)
    assert "those of LlamaForCausalLM" in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no folder"):
        loaded(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match=r"the folder has no `config\.json`"):
        loaded(tmp_path / "empty")
    folder = make(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(SpecError, match=r"`task\.reward_model\.path = .* cannot be loaded as a classifier"):
        loaded(folder)


def test_a_conversation_that_is_too_long_is_refused_or_cut_at_its_beginning(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    (error,) = loaded(folder, max_tokens=8).score([Item("1+1", "x" * 20)])
    assert isinstance(error, ScoringError)
    assert "more than 8 (`task.reward_model.max_tokens`)" in str(error)
    model = loaded(folder, max_tokens=8, too_long="truncate")
    assert model.tokenizer.decode(model._encode("1+1", "0123456789", None)).strip().endswith("789")
    assert len(model._encode("1+1", "0123456789", None)) == 8
    with pytest.raises(SpecError, match=r"`task\.reward_model\.max_tokens = 300` is more than the context"):
        loaded(folder, max_tokens=300)


def test_a_conversation_that_cannot_be_computed_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(make(tmp_path / "model"))
    expected = model.score(ITEMS)
    encode = model._encode

    def with_unknown_token(prompt: str, completion: str, messages: Any) -> list[int]:
        tokens = encode(prompt, completion, messages)
        return [*tokens, SIZES["vocab_size"] + 5] if prompt == "a" else tokens

    monkeypatch.setattr(model, "_encode", with_unknown_token)
    *others, failed = model.score(ITEMS)
    assert others == pytest.approx(expected[:3], abs=1e-5)
    assert isinstance(failed, ScoringError)
    assert "`task.reward_model.path = " in str(failed)


def test_a_device_that_fails_halts_scoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(make(tmp_path / "model"))

    def fail(rows: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(model, "_logits", fail)
    found = model.score(ITEMS)
    assert [type(each) for each in found] == [HaltError] * len(ITEMS), "no completion fails because of it"
    assert "illegal memory access" in str(found[0])
    assert "--resume" in str(found[0])


def test_memory_that_runs_out_halves_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(make(tmp_path / "model"))
    expected, logits = model.score(ITEMS), model._logits

    def with_little_memory(rows: list[list[int]]) -> list[float]:
        if len(rows) > 1 or (most is not None and len(rows[0]) > most):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits(rows)

    monkeypatch.setattr(model, "_logits", with_little_memory)
    most = None
    assert model.score(ITEMS) == pytest.approx(expected, abs=1e-5)
    most = 60
    found = model.score(ITEMS)
    assert [type(each) for each in found] == [float, HaltError, float, float]
    assert "lower `task.reward_model.max_tokens`" in str(found[1])


def test_a_worker_process_loads_it_once_and_scores_concurrently(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    options = RewardModelOptions(path=str(folder), max_tokens=60)
    recipe = parse_recipe(
        {
            "model": {"path": "tiny"},
            "task": {"type": "file", "path": "x.jsonl", "reward_model": {"path": str(folder)}},
            "runtime": {"device": "cpu"},
        }
    )
    expected = loaded(folder).score(ITEMS)

    async def run() -> list[Any]:
        built = model_scorer(recipe, options, "task.reward_model")
        pool = RewardPool([RewardSpec("", built.spec, built=built)], columns={"answer": None})
        await pool.start()
        try:
            calls = [pool.score(item.prompt, item.completion, {"answer": 1}) for item in ITEMS]
            return await asyncio.gather(*calls, pool.score("p", "x" * 100, {}), return_exceptions=True)
        finally:
            await pool.close()

    *found, long = asyncio.run(run())
    # The longest of these is longer than the limit of the worker.
    assert [type(each) for each in found] == [float, RewardError, float, float]
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert isinstance(long, RewardError)
    assert "more than 60" in str(long)

    async def refused() -> None:
        built = model_scorer(recipe, RewardModelOptions(path=str(tmp_path / "nowhere")), "task.reward_model")
        await RewardPool([RewardSpec("", built.spec, built=built)]).start()

    with pytest.raises(RecipeError, match=r"`task\.reward_model` cannot be used: `task\.reward_model\.path = "):
        asyncio.run(refused())
