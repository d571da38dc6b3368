"""TRL's learning curve against stand-ins with the interfaces that it uses."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from bench.gpu import trl_learning


class _Tokenizer:
    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return [len(messages)]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return f"Answer: {tokens[0]}"


class _Generation:
    """vLLM as TRL holds it: its answer to a problem is the version of the weights that it was last given."""

    def __init__(self) -> None:
        self.llm, self.given, self.trained = self, 0, 0

    def sync_weights(self) -> None:
        self.given = self.trained

    def generate(self, prompts: list[Any], sampling: Any, *, use_tqdm: bool) -> list[Any]:
        assert sampling.max_tokens == 9
        output = types.SimpleNamespace(token_ids=[self.given, 0])
        return [types.SimpleNamespace(outputs=[output]) for _ in prompts]


def test_every_point_of_the_curve_is_of_the_newest_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(SamplingParams=types.SimpleNamespace))
    held_out = [{"messages": [{}], "answer": "2"}, {"messages": [{}], "answer": "0"}]
    curve = trl_learning.Curve(held_out, every=2, max_tokens=9)
    generation = _Generation()
    trainer = types.SimpleNamespace(vllm_generation=generation, processing_class=_Tokenizer())
    asks = curve.callback([trainer])
    asks.on_train_begin()
    for step in range(1, 4):
        generation.trained = step
        asks.on_step_end(None, types.SimpleNamespace(global_step=step, max_steps=3), None)
    assert [(point["version"], point["score"]) for point in curve.points] == [(0, 0.5), (2, 0.5), (3, 0.0)]
    assert [point["mean_tokens"] for point in curve.points] == [2.0] * 3
    elapsed = [point["elapsed_s"] for point in curve.points]
    assert elapsed == sorted(elapsed)


def test_texts_are_scored_as_in_the_native_runs() -> None:
    assert trl_learning.score(["so\nAnswer: 12", "Answer: 13"], ["12", "12"]) == [1.0, 0.0]
