"""Ctrl-C at the end of a run, and what is told while one begins."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_cases import assert_verifies, recipe

import stretto.assembly.train as module
from stretto.cli import main
from stretto.observe import waiting
from stretto.run.folder_checks import standing


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """As in a terminal; a shell starts what it puts in the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def words(model: Path, folder: Path, *more: str) -> list[str]:
    recipe(model, folder)  # writes the file
    return ["train", str(folder / "recipe.toml"), "--out", str(folder / "run"), *more]


async def interrupted(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(60)


def test_an_interrupt_after_the_end_of_a_run_leaves_out_the_last_evaluation_and_is_no_failure(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate = module.evaluate_alone

    async def until_the_last(*arguments: Any, **options: Any) -> None:
        await (interrupted() if "after" in arguments else evaluate(*arguments, **options))

    monkeypatch.setattr(module, "evaluate_alone", until_the_last)
    before = signal.getsignal(signal.SIGINT)
    assert main(words(model, tmp_path)) == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert standing(tmp_path / "run") == "finished"
    said = " ".join(capsys.readouterr().out.split())
    assert "the trained policy is in" in said
    assert_verifies(tmp_path / "run")


def test_an_interrupt_before_the_policy_is_written_can_be_resumed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module, "export_policy", interrupted)
        assert main(words(model, tmp_path)) == 130
    assert f"continue with `stretto train --out {tmp_path / 'run'} --resume`" in capsys.readouterr().out
    assert standing(tmp_path / "run") == "stopped"
    assert not (tmp_path / "run" / "policy").exists()
    monkeypatch.setattr(sys, "argv", ["stretto", *words(model, tmp_path, "--resume")])
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main() == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "while the process ends"
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "run" / "policy").exists()
    assert_verifies(tmp_path / "run")


def test_a_long_start_says_what_it_waits_for_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.02)
    monkeypatch.setattr(waiting, "SAY_S", 0.15)
    said: list[str] = []

    async def work() -> int:
        await asyncio.sleep(0.25)
        return 7

    async def fails() -> None:
        raise KeyError("no")

    async def story() -> None:
        assert await waiting.report_wait(work(), lambda: f"{len(said)} things", said.append) == 7
        with pytest.raises(KeyError):
            await waiting.report_wait(fails(), lambda: "nothing", said.append)
        waits = asyncio.create_task(waiting.report_wait(work(), lambda: "nobody", said.append))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(story())
    assert [re.sub(r"\d+ s", "N s", text) for text in said] == [
        "waiting for 0 things, for N s now",
        "waiting for 1 things, for N s now",
    ]
