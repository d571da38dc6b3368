"""The vLLM engine over a child process that is a fake: faults of versions, the end of the child, stop strings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import prompt_of
from fake_vllm_child import DIES_OF, ENDS_OF, FAILS_OF
from vllm_cases import Children, blocked_child, options_of, probed_weights
from vllm_faults import ADAPTER_FAULTS

import stretto.engines.vllm.engine as engine_module
import stretto.engines.vllm.process as process_module
from stretto.engines.vllm import frames
from stretto.engines.vllm.engine import VllmEngine
from stretto.engines.vllm.process import ChildProcess
from stretto.engines.vllm.weight_folders import checksum_of_folder, write_folder
from stretto.errors import ChecksumError, EngineError, RecipeError, RequestError
from stretto.models.lora import WEIGHTS_FILE
from stretto.types import Request, Sampling, Supports

NONE_YET = Supports(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))


def request_of(number: int, version: int = 0, tokens: int = 24, **options: Any) -> Request:
    return Request(number, version, prompt_of(11), 77 + number, Sampling(tokens, **options))


@pytest.mark.parametrize("fault", ADAPTER_FAULTS)
def test_an_adapter_that_is_not_the_one_sent_is_found_before_its_first_token(
    fault: str, fake_children: Children, model: Any
) -> None:
    core = fake_children.core(options_of("model"))
    core.load(probed_weights("lora", model, 0, fake=True))
    with fake_children.fault(fault), pytest.raises(ChecksumError):
        core.load(probed_weights("lora", model, 1, fake=True))
    assert dict(core.report().versions) == {0: 0}
    assert core.load(probed_weights("lora", model, 1, fake=True)).version == 1, "sent again, it is taken"
    core.close()


def test_full_weights_with_a_stale_output_layer_are_found(fake_children: Children, model: Any) -> None:
    core = fake_children.core(options_of("model", kind="full", slots=1))
    core.load(probed_weights("full", model, 0, fake=True))
    with pytest.raises(RequestError, match=r"version 1: all 1 slots hold \[0\]"):
        core.load(probed_weights("full", model, 1, fake=True))
    core.unload(0)
    with fake_children.fault("stale head"), pytest.raises(ChecksumError, match="version 1 is not what the engine"):
        core.load(probed_weights("full", model, 1, fake=True))
    assert not core.report().versions
    assert core.load(probed_weights("full", model, 1, fake=True)).version == 1
    core.close()


def test_full_weights_that_come_back_with_other_bytes_are_found(fake_children: Children, model: Any) -> None:
    core = fake_children.core(options_of("model", kind="full", slots=1))
    weights = probed_weights("full", model, 0, fake=True)
    first = core.load(weights)
    assert first.held is not None
    assert first.layout == "1 x cpu, float32"
    core.unload(0)
    with fake_children.fault("other bytes"), pytest.raises(ChecksumError, match="when it was loaded before"):
        core.load(weights)
    assert not core.report().versions
    assert core.load(weights).held == first.held
    core.close()


def test_a_file_that_was_damaged_on_its_way_is_refused(
    fake_children: Children, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def truncated(folder: Path, *rest: Any) -> None:
        write_folder(folder, *rest)
        with (folder / WEIGHTS_FILE).open("r+b") as file:
            file.truncate(1000)

    core = fake_children.core(options_of("model"))
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "write_folder", truncated)
        with pytest.raises(ChecksumError, match="cannot be read"):
            core.load(probed_weights("lora", model, 0, fake=True))
    core.load(probed_weights("lora", model, 0, fake=True))
    core.close()


def test_weights_without_a_probe_are_refused(fake_children: Children, model: Any) -> None:
    core = fake_children.core(options_of("model"))
    with pytest.raises(RequestError, match="version 0 came without a probe"):
        core.load(replace(probed_weights("lora", model, 0, fake=True), probe=None))
    core.close()


def test_the_log_says_how_long_the_steps_of_a_load_took(
    fake_children: Children, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    core = fake_children.core(options_of("model"))
    with caplog.at_level("INFO", logger=engine_module.__name__):
        core.load(probed_weights("lora", model, 0, fake=True))
    core.close()
    number = r"(\d+\.\d\d)"
    steps = f"file written {number}, read back {number}, loaded by vLLM {number}, probe scored {number}"
    found = re.fullmatch(f"version 0 is loaded in {number} s: {steps}", caplog.messages[0])
    assert found is not None
    whole, *parts = map(float, found.groups())
    assert sum(parts) <= whole + 0.03, "of each, at most a hundredth is rounding"


def test_the_files_of_a_version_go_when_it_is_unloaded_and_not_before(fake_children: Children, model: Any) -> None:
    core = fake_children.core(options_of("model"))
    weights = probed_weights("lora", model, 0, fake=True)
    core.load(weights)
    folder = max(core._process.folder.glob("load-*"), key=lambda path: path.stat().st_mtime)
    assert checksum_of_folder(folder, "lora") == weights.checksum
    core.unload(0)
    assert not folder.exists()
    core.close()


def test_a_scale_that_is_no_round_number_keeps_its_checksum(model: Any, tmp_path: Path) -> None:
    from stretto.models.checksums import checksum

    for place, scale in enumerate((2.0, 20 / 3, 0.1, 1 / 7)):
        tensors = probed_weights("lora", model, 0, fake=True).tensors
        weights = replace(probed_weights("lora", model, 0, fake=True), scale=scale, checksum=checksum(tensors, scale))
        write_folder(tmp_path / str(place), weights, "base")
        assert checksum_of_folder(tmp_path / str(place), "lora") == weights.checksum


def test_a_child_that_dies_ends_its_engine_and_nothing_else(fake_children: Children, model: Any) -> None:
    async def main() -> None:
        first, second = fake_children.engine(options_of("model")), fake_children.engine(options_of("model"))
        for engine in (first, second):
            await engine.load(probed_weights("lora", model, 0, fake=True))
        running = [asyncio.ensure_future(first.generate(request_of(i, tokens=400))) for i in range(4)]
        await asyncio.sleep(0)  # they are sent, and none has time to end
        with pytest.raises(EngineError, match="ended with signal 9"):
            await first.generate(Request(9, 0, (DIES_OF,), 0, Sampling(4)))
        for ended in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(ended, EngineError)
        done = await asyncio.gather(*(second.generate(request_of(i)) for i in range(4)))
        assert [completion.id for completion in done] == list(range(4))
        await first.close()
        await second.close()

    asyncio.run(main())


def test_what_ended_before_the_child_did_is_not_lost(
    fake_children: Children, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = fake_children.core(options_of("model"))
    core.load(probed_weights("lora", model, 0, fake=True))
    core.add(request_of(1, tokens=2))
    core.add(request_of(2, tokens=400))
    first = core._trajectories[1].key
    sent: list[Any] = [frames.Tokens((frames.Piece(first, (5, 6), (-1.0, -2.0), "length"),))]

    def receive(timeout_s: float) -> Any:
        if not sent:
            raise EngineError("the child is gone")
        return sent.pop()

    with monkeypatch.context() as patch:
        patch.setattr(core._process, "receive", receive)
        (done,) = core.step()
        assert (done.id, done.tokens.tolist()) == (1, [5, 6])
        with pytest.raises(EngineError, match="the child is gone"):
            core.step()
    core.close()


def test_a_request_that_fails_in_the_child_fails_alone(fake_children: Children, model: Any) -> None:
    async def main() -> None:
        engine = fake_children.engine(options_of("model"))
        await engine.load(probed_weights("lora", model, 0, fake=True))
        with pytest.raises(RequestError, match="this prompt fails"):
            await engine.generate(Request(0, 0, (FAILS_OF,), 0, Sampling(4)))
        with pytest.raises(RequestError, match="has ended it without a reason"):
            await asyncio.wait_for(engine.generate(Request(0, 0, (ENDS_OF,), 0, Sampling(4))), 20)
        assert (await engine.generate(request_of(1))).id == 1
        await engine.close()

    asyncio.run(main())


def test_a_stop_string_ends_a_trajectory_with_the_token_that_completes_it(fake_children: Children, model: Any) -> None:
    def decode(tokens: Any) -> str:
        return "".join(chr(65 + token) for token in tokens)

    async def main() -> None:
        engine = fake_children.engine(options_of("model"), decode=decode)
        await engine.load(probed_weights("lora", model, 0, fake=True))
        plain = await engine.generate(request_of(0, tokens=60))
        string = decode(plain.tokens.tolist())[4:7]
        stopped = await engine.generate(request_of(0, tokens=60, stop_strings=(string,)))
        assert stopped.finish == "stop"
        assert np.array_equal(stopped.tokens, plain.tokens[: decode(plain.tokens.tolist()).index(string) + 3])
        await engine.unload(0)
        await engine.close()

    asyncio.run(main())


def test_an_engine_that_cannot_be_made_says_why() -> None:
    with pytest.raises(RecipeError, match="there is no such model"):
        ChildProcess(options_of("missing"), module="fake_vllm_child")


def test_a_child_that_takes_too_long_to_start_is_ended() -> None:
    with pytest.raises(RecipeError, match=r"cannot be made: the child process has not answered `start` for 0\.2 s"):
        ChildProcess(options_of("blocks"), start_s=0.2, module="fake_vllm_child")


def test_a_child_that_is_still_starting_ends_with_its_pipe(tmp_path: Path) -> None:
    """The driver is killed while vLLM loads the model, and blocks the loop of the child."""
    child, pipe = blocked_child(tmp_path / "folder")
    assert _until(lambda: "sleep" in _group(child.pid))
    pipe.close()
    assert child.wait(60) != 0
    assert _until(lambda: not _group(child.pid)), _group(child.pid)
    assert not (tmp_path / "folder").exists()


def _group(leader: int) -> set[str]:
    """The names of the processes of a group."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, rest = path.read_text().split("(", 1)[1].rsplit(")", 1)
            state, _, group = rest.split()[:3]
            if int(group) == leader and state != "Z":
                found.add(name)
    return found


def _until(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_so()


def test_a_child_that_is_killed_while_it_starts_leaves_no_processes(tmp_path: Path) -> None:
    child, pipe = blocked_child(tmp_path / "folder")
    assert _until(lambda: "sleep" in _group(child.pid))
    child.kill()
    child.wait()
    assert _until(lambda: not _group(child.pid)), _group(child.pid)
    assert (tmp_path / "folder").exists(), "its engine is there, reads the log in it and removes it"
    pipe.close()


def test_a_child_that_is_killed_with_its_engine_leaves_neither_processes_nor_files(tmp_path: Path) -> None:
    """So does Ray with an actor: it kills the processes that the actor has started, and not those below."""
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from vllm_cases import blocked_child\n"
        "child, pipe = blocked_child(Path(sys.argv[1]))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    folder = tmp_path / "folder"
    command = [sys.executable, "-c", program, str(folder)]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert engine.stdout is not None
    child = int(engine.stdout.readline())
    assert _until(lambda: "sleep" in _group(child))
    os.kill(child, signal.SIGKILL)
    engine.kill()
    engine.wait()
    assert _until(lambda: not _group(child)), _group(child)
    assert _until(lambda: not folder.exists())


def test_a_start_that_is_interrupted_leaves_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ChildProcess] = []

    def interrupted(self: ChildProcess, *_: Any, **__: Any) -> None:
        made.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ChildProcess, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ChildProcess(options_of("model"), module="fake_vllm_child")
    assert not _is_alive(made[0].pid)
    assert not made[0].folder.exists()


def test_a_call_has_the_deadline_of_the_run(model: Any) -> None:
    """A load of large weights takes longer than the default, and the run says how long it may."""
    child = ChildProcess(options_of("model"), answer_s=0.3, module="fake_vllm_child")
    os.kill(child.pid, signal.SIGSTOP)
    core = VllmEngine(child, options_of("model"), kv_tokens=512)
    with pytest.raises(EngineError, match=r"has not answered `load` for 0\.3 s \(`runtime\.instance_seconds`\)"):
        core.load(probed_weights("lora", model, 0, fake=True))
    core.close()


def test_weights_that_cannot_be_written_are_told_with_the_folder(fake_children: Children, model: Any) -> None:
    core = fake_children.core(options_of("model"))
    folder = core._process.folder
    core._process.folder = Path("/dev/null")  # no folder can be made in it
    try:
        with pytest.raises(EngineError, match=r"version 0 cannot be written to `/dev/null/load-.*set `TMPDIR`"):
            core.load(probed_weights("lora", model, 0, fake=True))
    finally:
        core._process.folder = folder
    core.close()


def test_files_are_in_memory_if_there_is_room_for_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_module, "MEMORY_FOLDER", tmp_path)
    free = shutil.disk_usage(tmp_path).free
    small, large = options_of("model", file_bytes=1 << 20), options_of("model", file_bytes=free)
    assert process_module._scratch(small) == tmp_path
    assert process_module._scratch(replace(small, kind="full")) == tmp_path
    assert process_module._scratch(large) is None
    monkeypatch.setattr(process_module, "MEMORY_SHARE", 0.0)
    assert process_module._scratch(small) is None, "it would take too much of the machine's memory"


@pytest.mark.slow
def test_a_child_ends_with_its_engine_s_process(tmp_path: Path) -> None:
    """The driver is killed: the child notices by its pipe, and leaves neither processes nor files."""
    program = (
        "import sys, time\n"
        "from vllm_cases import options_of\n"
        "from stretto.engines.vllm.process import ChildProcess\n"
        "child = ChildProcess(options_of('model'), module='fake_vllm_child')\n"
        "print(child.pid, child.folder, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert driver.stdout is not None
    pid, folder = driver.stdout.readline().split()
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (_is_alive(int(pid)) or Path(folder).exists()):
        time.sleep(0.05)
    assert not _is_alive(int(pid))
    assert not Path(folder).exists()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state != "Z"


def test_the_signal_that_ended_a_child_is_told() -> None:
    child = ChildProcess(options_of("model"), module="fake_vllm_child")
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="ended with signal 9"):
        child.receive(10.0)
    child.close()
    child.close()


def test_the_time_until_the_first_token_counts_as_work(fake_children: Children, model: Any) -> None:
    """It is the time of prefilling, and the loop measures how fast that is."""
    core = fake_children.core(options_of("model"))
    core.load(probed_weights("lora", model, 0, fake=True))
    core.add(replace(request_of(1), priority=1))
    time.sleep(0.05)
    assert core.report().busy_s == 0, "evaluation does not count"
    for number in range(2, 2 + 2 * core.capacity.rows):
        core.add(request_of(number))
    before = core.report()
    time.sleep(0.05)
    after = core.report()
    assert after.busy_s - before.busy_s >= 0.05
    rows = (after.row_s - before.row_s) / (after.busy_s - before.busy_s)
    assert rows == pytest.approx(core.capacity.rows), "the others are queued"
    core.close()


def test_steps_are_those_of_vllm_however_their_tokens_come(fake_children: Children, model: Any) -> None:
    """In parts of a step, as vLLM hands out more than 128 rows, or several tokens at once, each request at its time."""
    core = fake_children.core(options_of("model"))
    core.load(probed_weights("lora", model, 0, fake=True))
    for number in range(4):
        core.add(replace(request_of(number), sampling=Sampling(100)))
    keys = list(core._by_key)

    def steps(*parts: tuple[int, ...], tokens: int = 1) -> int:
        before = core.report().steps
        for own in parts:
            made = (1,) * tokens, (-1.0,) * tokens
            core._take_in(frames.Tokens(tuple(frames.Piece(keys[number], *made) for number in own)))
        return core.report().steps - before

    assert steps((0, 1), (2, 3), (0, 1), (2, 3)) == 2
    assert steps((0, 1, 2, 3), (0, 1, 2, 3)) == 2
    assert steps((0,), (1,), (2,), (3,), tokens=16) == 16
    assert steps((0, 1), (2, 3), tokens=16) == 16
    core.close()


def test_what_truncated_sampling_leaves_is_recorded_over_a_move(fake_children: Children, model: Any) -> None:
    core = fake_children.core(options_of("model", masks=True))
    assert core.capabilities.records_supports
    core.load(probed_weights("lora", model, 0, fake=True))
    core.add(request_of(1, tokens=200, top_k=5))
    (before,) = core.suspend([1], kv=False)  # a moment after it came: most often before its first token
    core.add(replace(before, tokens=before.tokens[:0], logprobs=before.logprobs[:0], supports=NONE_YET))
    while core.report().kv_tokens < len(prompt_of(11)) + 3:
        assert core.step() == []
    (out,) = core.suspend([1], kv=False)
    assert out.supports is not None
    assert len(out.supports) == len(out.tokens) >= 3
    core.add(out)
    done: list[Any] = []
    while not done:
        done = core.step()
    assert len(done[0].supports) == len(done[0].tokens) > len(out.tokens)
    assert np.array_equal(done[0].supports.counts, np.full(len(done[0].tokens), 2))
    assert np.array_equal(done[0].supports.tokens[::2], done[0].tokens)
    core.add(request_of(2, tokens=4, top_k=5, supports=False))
    core.add(request_of(3, tokens=4, temperature=0.0))
    with pytest.raises(RequestError, match="has no `top_k`"):
        core.add(request_of(4, tokens=4))
    ended: list[Any] = []
    while len(ended) < 2:
        ended += core.step()
    assert [each.supports for each in ended] == [None, None]
    core.close()
