"""A finished policy behind an endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import aiohttp
import pytest
import torch
from endpoint_cases import FakeConversations
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from stretto.assembly.serve import PolicyFolder, ServeOptions, load
from stretto.cli import main
from stretto.errors import ModelError, RunError
from stretto.models.lora import inject_lora, lora_tensors, write_adapter
from stretto.models.lora_options import LoraOptions
from stretto.serve.http import Endpoint

OPTIONS = ServeOptions(port=0, key="a key for tests", device="cpu", rows=2)


def _greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    options = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    made = model.generate(torch.tensor([tokens]), max_new_tokens=count, **options)
    return made[0, len(tokens) :].tolist()


async def _post(endpoint: Endpoint, path: str, body: object) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": "Bearer a key for tests"}
    async with (
        aiohttp.ClientSession(headers=headers) as connection,
        connection.post(endpoint.url + path, json=body) as response,
    ):
        return response.status, await response.json()


async def _served(folder: Path, *bodies: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    engine, calls, model = await load(PolicyFolder.find(folder), OPTIONS, lambda _: FakeConversations())
    endpoint = Endpoint(calls, model)
    try:
        await endpoint.start()
        return [await _post(endpoint, "/inference/v1/generate", body) for body in bodies]
    finally:
        await endpoint.close()
        await engine.close()


def test_a_whole_model_answers_with_its_own_tokens(model: Path) -> None:
    tokens = AutoTokenizer.from_pretrained(model).encode("4+3*17?")
    expected = _greedy(AutoModelForCausalLM.from_pretrained(model), tokens, 8)
    body = {"token_ids": tokens, "sampling_params": {"temperature": 0, "max_tokens": 8}}
    seeded = {"token_ids": tokens, "sampling_params": {"temperature": 1, "max_tokens": 8, "seed": 5}}
    long = {"token_ids": [5] * 100_000}
    answers = asyncio.run(_served(model, body, seeded, seeded, long, {"token_ids": [10**6]}))
    assert [status for status, _ in answers] == [200, 200, 200, 400, 400]
    texts = [made["choices"][0]["token_ids"] for _, made in answers[:3]]
    stop = AutoTokenizer.from_pretrained(model).eos_token_id
    assert texts[0] == expected[: expected.index(stop) + 1] if stop in expected else texts[0] == expected
    assert texts[1] == texts[2]
    assert answers[3][1]["error"]["code"] == "context_length_exceeded"


def test_an_adapter_is_served_on_its_base(model: Path, tmp_path: Path) -> None:
    options = LoraOptions(rank=4)
    adapted: Any = AutoModelForCausalLM.from_pretrained(model)
    names = inject_lora(adapted, 4, options.effective_alpha)
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(t.shape, generator=generator) / 4 for name, t in lora_tensors(adapted, names).items()}
    folder = tmp_path / "run" / "policy"
    write_adapter(folder, tensors, options=options, base=str(model), names=names)
    tokens = AutoTokenizer.from_pretrained(model).encode("4+3*17?")
    base = AutoModelForCausalLM.from_pretrained(model)
    plain = _greedy(base, tokens, 8)
    expected = _greedy(PeftModel.from_pretrained(base, str(folder)), tokens, 8)
    assert expected != plain
    body = {"token_ids": tokens, "sampling_params": {"temperature": 0, "max_tokens": 8}}
    ((status, made),) = asyncio.run(_served(tmp_path / "run", body))
    said = made["choices"][0]["token_ids"]
    assert status == 200
    assert said == expected[: len(said)]


def test_chats_are_served_and_nothing_takes_a_reward(model: Path) -> None:
    async def run() -> None:
        class Conversations(FakeConversations):
            """Stands in for the chat template."""

            def request(self, messages: Any, tools: Any = None, *, train: bool = True) -> Any:
                return type("", (), {"tokens": (5, 6, 7), "lineage": 0, "train": train})

        engine, calls, seen = await load(PolicyFolder.find(model), OPTIONS, lambda _: Conversations())
        endpoint = Endpoint(calls, seen)
        try:
            await endpoint.start()
            body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0}
            status, made = await _post(endpoint, "/v1/chat/completions", body)
            assert (status, made["usage"]["prompt_tokens"]) == (200, 3)
            assert made["usage"]["completion_tokens"] <= 3
            status, made = await _post(endpoint, "/sessions/1/reward", {"reward": 1})
            assert status == 400
            assert "trains nothing" in made["error"]["message"]
        finally:
            await endpoint.close()
            await engine.close()

    asyncio.run(run())


def test_folders_without_a_policy_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="holds no policy"):
        PolicyFolder.find(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="no configuration of an adapter"):
        PolicyFolder.find(tmp_path)
    (tmp_path / "key").write_text("short")
    for arguments in (["--port", "70000"], ["--rows", "0"], ["--key-file", str(tmp_path / "key")]):
        assert main(["serve", str(tmp_path), *arguments]) == 2
        assert arguments[0] in capsys.readouterr().err


def test_a_missing_library_is_told_before_the_model_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main(["serve", str(model)]) == 2
    said = capsys.readouterr()
    assert "needs the package aiohttp" in said.err
    assert "loading" not in said.out


def test_the_command_serves_until_it_is_interrupted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":  # so that it needs none
            (folder / file.name).write_bytes(file.read_bytes())
    said: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr("stretto.cli.serve._print", said.put)
    found: list[object] = []

    def call_and_interrupt() -> None:
        try:
            _, serving, key = (said.get(timeout=60) for _ in range(3))
            url = serving.partition(" at ")[2].partition("/v1")[0]
            headers = {"Authorization": f"Bearer {key.removeprefix('key: ')}"}
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers)) as response:
                found.append(json.load(response)["data"][0]["id"])
            try:
                urllib.request.urlopen(f"{url}/v1/models")
            except urllib.error.HTTPError as error:
                found.append(error.code)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=call_and_interrupt)
    thread.start()
    assert main(["serve", str(folder), "--port", "0", "--device", "cpu", "--rows", "2"]) == 0
    thread.join()
    assert found == ["policy", 401]
