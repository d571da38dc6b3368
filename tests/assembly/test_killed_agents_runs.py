"""A driver that is killed with 500 sessions open: the run is resumed, and every trajectory is trained once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_cases import assert_verifies, rows, run, small_recipe

from stretto.recipe.schema import Recipe

pytest.importorskip("aiohttp")

SESSIONS = 500

# Two calls, and between them a wait for the file `go`. Those of a few prompts do not wait: updates are made of them.
AGENT = """
import asyncio, os
import aiohttp

CONNECTIONS = []

async def solve(task, access):
    if not CONNECTIONS:
        CONNECTIONS.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
    headers = {"Authorization": "Bearer " + access.api_key}

    async def ask(said):
        body = {"messages": [{"role": "user", "content": said}]}
        async with CONNECTIONS[0].post(access.base_url + "/chat/completions", json=body, headers=headers) as response:
            return (await response.json())["choices"][0]["message"]["content"]

    first = await ask(task["prompt"])
    if task["answer"] % 8:
        with open("open.txt", "a") as file:
            file.write(".")
        while not os.path.exists("go"):
            await asyncio.sleep(0.1)
    return (len(first) + len(await ask(first[-4:] or "="))) % 7
"""


def agents(model: Path, folder: Path) -> Recipe:
    (folder / "waiting_agent.py").write_text(AGENT)
    tables = """
        [task]
        type = "agent"
        path = "prompts.jsonl"
        function = "waiting_agent:solve"
        turns = 2
        [rollout]
        prompts = 4
        group = 8
        staleness = 16
        in_flight = "full"
        rows = 64
        max_tokens = 4
        [training]
        steps = 20
        [evaluation]
        prompts = 0
        [runtime]
        stall_seconds = 120.0
        checkpoint_seconds = 0.001
    """
    return small_recipe(model, folder, tables)


@pytest.mark.slow
def test_a_driver_that_is_killed_with_500_sessions_open_is_resumed_and_nothing_is_lost(
    model: Path, tmp_path: Path
) -> None:
    made = agents(model, tmp_path)
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", "train", "recipe.toml", "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 240
        started = tmp_path / "open.txt"
        while (
            not started.exists()
            or started.stat().st_size < SESSIONS
            or not rows(folder, "SELECT 1 FROM updates WHERE finished_at IS NOT NULL")
        ):
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
            assert time.monotonic() < deadline, started.stat().st_size if started.exists() else 0
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
    running = rows(folder, "SELECT COUNT(*) FROM trajectories WHERE state IN ('running', 'waiting')")
    assert running[0][0] >= SESSIONS
    (tmp_path / "go").touch()
    summary = run(made, folder, resume=True)
    assert summary["trained_trajectories"] == 20 * 32
    assert_verifies(folder)
    assert rows(folder, "SELECT COUNT(*) FROM failures") == [(0,)]
    trained = rows(folder, "SELECT trajectory, COUNT(*) FROM members WHERE lineage = 0 GROUP BY trajectory")
    assert len(trained) == 20 * 32
