"""The vLLM engine with the real vLLM, on the CPU: `make test-vllm`. One child serves all tests of a kind of weights."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import prompt_of
from vllm_cases import Children, logprobs_of, options_of, probed_weights
from vllm_faults import ADAPTER_FAULTS

from stretto.errors import ChecksumError
from stretto.types import Request, Sampling

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: `make test-vllm`"
)

RECIPE = """
[model]
path = "tiny"
warm_start = { steps = 0 }
LORA
[task]
type = "countdown-chain"

[rollout]
prompts = 4
group = 4
max_tokens = 96
ROLLOUT
[training]
steps = STEPS
learning_rate = 3e-3

[evaluation]
prompts = 0

[engine]
type = "vllm"
"""


def request_of(number: int, version: int = 0, tokens: int = 24, **options: Any) -> Request:
    return Request(number, version, prompt_of(11), 77 + number, Sampling(tokens, **options))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_the_version_and_the_temperature(
    temperature: float, vllm_children: Children, model_folder: Path, model: Any
) -> None:
    async def main() -> None:
        engine = vllm_children.engine(options_of(str(model_folder)))
        weights = {version: probed_weights("lora", model, version, fake=False) for version in (0, 1)}
        for each in weights.values():
            await engine.load(each)
        done = await asyncio.gather(
            *(engine.generate(request_of(i, i % 2, temperature=temperature)) for i in range(12))
        )
        for completion in done:
            tokens = [*prompt_of(11), *completion.tokens.tolist()]
            wanted = logprobs_of(model, weights[completion.version], tokens, temperature)[10:]
            assert np.allclose(completion.logprobs, wanted, atol=1e-4)
            other = logprobs_of(model, weights[1 - completion.version], tokens, temperature)[10:]
            assert not np.allclose(completion.logprobs, other, atol=1e-2)
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("fault", ADAPTER_FAULTS)
def test_an_adapter_that_is_not_the_one_sent_is_found_before_its_first_token(
    fault: str, vllm_children: Children, model_folder: Path, model: Any
) -> None:
    core = vllm_children.core(options_of(str(model_folder)))
    core.load(probed_weights("lora", model, 0, fake=False))
    with vllm_children.fault(fault), pytest.raises(ChecksumError):
        core.load(probed_weights("lora", model, 1, fake=False))
    assert dict(core.report().versions) == {0: 0}
    assert core.load(probed_weights("lora", model, 1, fake=False)).version == 1, "sent again, it is taken"
    core.close()


def test_full_weights_are_replaced_and_a_stale_output_layer_is_found(
    vllm_children: Children, model_folder: Path, model: Any
) -> None:
    async def main() -> None:
        engine = vllm_children.engine(options_of(str(model_folder), kind="full", slots=1, lora_rank=0, lora_targets=()))
        for version in (1, 2, 0):
            weights = probed_weights("full", model, version, fake=False)
            await engine.load(weights)
            done = await engine.generate(request_of(version, version))
            wanted = logprobs_of(model, weights, [*prompt_of(11), *done.tokens.tolist()])[10:]
            assert np.allclose(done.logprobs, wanted, atol=1e-4), "the prompt was cached under the version before"
            await engine.unload(version)
        with vllm_children.fault("stale head"), pytest.raises(ChecksumError, match="version 1 is not what the engine"):
            await engine.load(probed_weights("full", model, 1, fake=False))
        assert not engine.report().versions
        await engine.load(probed_weights("full", model, 1, fake=False))
        await engine.close()

    asyncio.run(main())


def _train(folder: Path, lora: str, rollout: str, steps: int) -> subprocess.Popen[bytes]:
    text = RECIPE.replace("LORA", lora).replace("ROLLOUT", rollout).replace("STEPS", str(steps))
    (folder / "recipe.toml").write_text(text)
    command = [sys.executable, "-m", "stretto", "train", "recipe.toml", "--out", "run"]
    return subprocess.Popen(command, cwd=folder, stdout=(folder / "log").open("wb"), stderr=subprocess.STDOUT)


def _verified(folder: Path) -> str:
    found = subprocess.run(
        [sys.executable, "-m", "stretto", "verify", "run"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def _child_of(pid: int) -> int | None:
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)]  # else a long path hides the module
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return next((int(line.split()[0]) for line in found.stdout.splitlines() if "engines.vllm.child" in line), None)


def test_a_run_whose_child_is_killed_loses_nothing(tmp_path: Path) -> None:
    run = _train(tmp_path, "lora = { rank = 4 }", "staleness = 1", steps=24)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 400
    while not (metrics.exists() and metrics.read_text().count('"update"') >= 2):
        assert run.poll() is None, (tmp_path / "log").read_text()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = _child_of(run.pid)
    assert child is not None
    os.kill(child, signal.SIGKILL)
    assert run.wait(500) == 0, (tmp_path / "log").read_text()[-2000:]
    said = _verified(tmp_path)
    assert "384 trained, 0 failed, 0 filtered, 0 dropped" in said
    assert "384 of the completions by receipt" in said
    import sqlite3

    with sqlite3.connect(tmp_path / "run" / "journal.sqlite") as journal:
        lost = journal.execute("SELECT reason FROM instances WHERE outcome = 'lost'").fetchall()
    assert len(lost) == 1
    assert re.search("signal 9", lost[0][0])


def test_a_run_with_full_weights_is_verified_by_receipt(tmp_path: Path) -> None:
    run = _train(tmp_path, "", 'paradigm = "synchronous"', steps=2)
    assert run.wait(500) == 0, (tmp_path / "log").read_text()[-2000:]
    assert "32 of the completions by receipt" in _verified(tmp_path)
