"""vLLM in the child process, with a fake of the package: what its outputs become, and which of them are refused."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_cases import options_of

from stretto.engines.vllm import frames
from stretto.engines.vllm.vllm_backend import VllmBackend

FAKE = Path(__file__).parents[2] / "cases" / "fake_vllm"


@pytest.fixture
def fake_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has this process import the fake instead of vLLM."""
    before = {name for name in sys.modules if name.partition(".")[0] == "vllm"}
    if before:
        pytest.skip("vLLM is imported already")
    monkeypatch.syspath_prepend(str(FAKE))
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def output(finish: str | None, *tokens: int, stamp: str | None = None) -> Any:
    """An output of vLLM with tokens of log-probability -1."""
    made = SimpleNamespace(
        token_ids=list(tokens),
        logprobs=[{token: SimpleNamespace(logprob=-1.0)} for token in tokens],
        finish_reason=finish,
        weight_versions=None if stamp is None else [SimpleNamespace(version=stamp)],
        sampling_mask=None,
    )
    return SimpleNamespace(outputs=[made], num_cached_tokens=0)


def pieces_of(*outputs: Any, stamp: str = "") -> list[frames.Piece]:
    """The pieces that a request becomes for which vLLM has these outputs."""
    backend = VllmBackend()

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        for each in outputs:
            yield each

    backend._llm, backend._stamp = SimpleNamespace(generate=generate), stamp
    backend._options = options_of("model", kind="full", slots=1)
    work = frames.Generate(1, 1, (1, 2), 0, 8, 1.0, 1.0, 0, 0.0, (), 0)

    async def main() -> list[frames.Piece]:
        return [piece async for piece in backend.generate(work)]

    return asyncio.run(main())


def test_outputs_become_pieces_and_an_abort_has_no_finish(fake_package: None) -> None:
    assert pieces_of(output(None, 5), output("stop", 6, 7)) == [
        frames.Piece(1, (5,), (-1.0,)),
        frames.Piece(1, (6, 7), (-1.0, -1.0), "stop"),
    ]
    assert pieces_of(output(None, 5), output("abort", 6)) == [
        frames.Piece(1, (5,), (-1.0,)),
        frames.Piece(1, (6,), (-1.0,)),
    ]


def test_an_abort_without_a_new_token_may_carry_all_log_probabilities(fake_package: None) -> None:
    """vLLM 0.26 takes `logprobs[-0:]`, which is everything."""
    aborted, late = output("abort"), output("abort", 7)
    aborted.outputs[0].logprobs = output(None, 5, 6).outputs[0].logprobs
    late.outputs[0].logprobs = output(None, 7, 5, 6, 7).outputs[0].logprobs  # two outputs that vLLM has joined
    assert pieces_of(output(None, 5, 6), aborted) == [frames.Piece(1, (5, 6), (-1.0, -1.0))]
    assert pieces_of(output(None, 5, 6), late)[1:] == [frames.Piece(1, (7,), (-1.0,))]


def test_a_token_without_its_log_probability_fails_the_request(fake_package: None) -> None:
    short = output(None, 5, 6)
    del short.outputs[0].logprobs[0]
    with pytest.raises(RuntimeError, match="vLLM has told the log-probabilities of 1 of 2 tokens"):
        pieces_of(short)


@pytest.mark.parametrize("reason", ["error", "repetition"])
def test_a_request_that_vllm_gives_up_fails(reason: str, fake_package: None) -> None:
    with pytest.raises(RuntimeError, match=f"vLLM has ended it with `{reason}`"):
        pieces_of(output(None, 5), output(reason))


@pytest.mark.parametrize("finish", ["stop", "abort"])
def test_tokens_of_other_weights_than_the_last_load_are_refused(finish: str, fake_package: None) -> None:
    assert pieces_of(output(finish, 5, stamp="load-2"), stamp="load-2")
    with pytest.raises(RuntimeError, match=r"vLLM has sampled under the weights \['load-1'\]"):
        pieces_of(output(finish, 5, stamp="load-1"), stamp="load-2")
