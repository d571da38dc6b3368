"""TRL's asynchronous side of GSM8K: its clock, settings, server and evaluations, against stand-ins."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benches are no part of the package

from bench.gpu import tree_attention, trl_async_gsm8k, trl_gsm8k
from bench.gpu.cells import Cells
from bench.gpu.problems import Score
from bench.gpu.trl_async_gsm8k import Recorder, Reward, Servers, Setting, fastest
from bench.gpu.vllm_server import Server, served_rank

# -- the clock ---------------------------------------------------------------------------------------------------------


class Run:
    """A run of TRL as its callbacks see it: 5 s an update, 2 of them of waiting, and 10 s more for the first."""

    def __init__(self, folder: Path, seconds: float, every: int, last: int = 100) -> None:
        self.now, self.folder, self.trained = 1_000.0, folder, 0
        self.recorder = Recorder(every=every, seconds=seconds, completions=4, swept_s=30.0, now=lambda: self.now)
        self.recorder.train_begins(100.0, self.published(0))
        for step in range(1, last + 1):
            self.now += 5.0 if step > 1 else 15.0
            self.trained = step
            stop = self.recorder.step_ends(step, step == last, self.published(step))
            logs = {
                "batch/trained_tokens_per_step": 12.0, "perf/rollout_wait_s": 2.0, "reward": 0.5, "ratio": None,
                "sample/staleness_mean": 1.5, "sample/dropped_stale_total": 1.0,
            }  # fmt: skip
            self.recorder.logged(step, logs)
            if stop:
                break
        self.recorder.logged(self.trained, {"train_runtime": 9.0})

    def published(self, version: int) -> Path:
        """TRL's folder of a version; the one before is removed."""
        made = self.folder / f"trl-policy-v{version + 1}"
        made.mkdir()
        (made / "adapter_config.json").write_text(str(version))
        if version:
            before = self.folder / f"trl-policy-v{version}"
            (before / "adapter_config.json").unlink()
            before.rmdir()
        return made


def test_the_limit_begins_after_the_first_update_and_versions_outlive_those_that_trl_removes(tmp_path: Path) -> None:
    run = Run(tmp_path, seconds=12.0, every=3)
    assert run.trained == 4  # 5, 10 and 15 s after the first update
    assert sorted(run.recorder.kept) == [0, 3, 4]
    for version, folder in run.recorder.kept.items():
        assert (folder / "adapter_config.json").read_text() == str(version)


def test_points_have_the_second_of_their_update_whenever_they_are_asked_for(tmp_path: Path) -> None:
    recorder = Run(tmp_path, seconds=12.0, every=2).recorder
    recorder.evaluated(4, Score(0.4, 8, 3.0, 0.0), 50.0)
    assert recorder.results()["eval_before"] is None  # the last version is scored first
    for version in (0, 2):
        recorder.evaluated(version, Score(version / 10, 8, 3.0, 0.0), 50.0)
    points = [(point["version"], point["elapsed_s"], point["after_first_s"]) for point in recorder.points]
    assert points == [(0, 0.0, 0.0), (2, 20.0, 5.0), (4, 30.0, 15.0)]
    found = recorder.results()
    assert (found["eval_before"], found["eval_after"], found["eval_best"]) == (0.0, 0.4, 0.4)


def test_rates_leave_the_first_update_out_and_start_up_the_sweep(tmp_path: Path) -> None:
    found = Run(tmp_path, seconds=12.0, every=0).recorder.results()
    assert (found["startup_s"], found["first_update_s"], found["wall_s"], found["updates"]) == (70.0, 15.0, 30.0, 4)
    assert (found["seconds_per_update"], found["tokens_per_s"], found["length_mean"]) == (5.0, 12 / 5.0, 3.0)
    assert (found["rollout_and_scoring_s_per_update"], found["training_s_per_update"]) == (2.0, 3.0)
    assert (found["dropped_share"], found["staleness_mean"]) == (4 / 20, 1.5)
    first = found["by_update"][0]
    assert (first["tokens"], first["training_s"], first["reward_mean"]) == (12, 13.0, 0.5)
    assert "importance_ratio" not in first  # TRL had no value


def test_a_sweep_keeps_no_version(tmp_path: Path) -> None:
    assert Run(tmp_path, seconds=1e9, every=0, last=2).recorder.kept == {}


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("32:off", Setting(32, False)),
        ("8:on:0.4", Setting(8, True, memory=0.4)),
        ("64:off:stale=2:inflight=768:queue=256", Setting(64, False, stale=2, inflight=768, queue=256)),
        ("64:off:stale=0", Setting(64, False, stale=0)),
    ],
)
def test_a_setting_is_read_and_written_alike(text: str, setting: Setting) -> None:
    assert Setting.parse(text) == setting
    assert Setting.parse(str(setting)) == setting
    assert Setting.of(json.loads(json.dumps(setting.parameters()))) == setting


@pytest.mark.parametrize("text", ["", "32", "0:on", "8:maybe", "8:on:1.5", "8:on:stale=x", "8:on:queue=0", "8:on:fast"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"`{text}`"):
        Setting.parse(text)


def options(tmp_path: Path, *arguments: str) -> argparse.Namespace:
    return trl_async_gsm8k.parser_of().parse_args(["--out", str(tmp_path), "--device", "cuda", *arguments])


def test_an_update_is_one_optimizer_step_over_all_completions(tmp_path: Path) -> None:
    wanted = trl_async_gsm8k.async_options(options(tmp_path), Setting(16, False, stale=2), 64, 9, tmp_path, "http://x")
    assert wanted["per_device_train_batch_size"] * wanted["gradient_accumulation_steps"] == 512
    assert wanted["token_budget"] == 0  # else micro-batches hold as many completions as fit
    assert (wanted["learning_rate"], wanted["lr_scheduler_type"], wanted["max_steps"]) == (5e-5, "constant", 9)
    assert (wanted["max_staleness"], wanted["max_inflight_tasks"], wanted["queue_maxsize"]) == (2, -1, 1_024)
    assert "epsilon" not in wanted  # as TRL has it
    with pytest.raises(ValueError, match="512 completions an update"):
        trl_async_gsm8k.async_options(options(tmp_path), Setting(24, False), 64, 9, tmp_path, "http://x")


def test_the_reward_can_be_sent_to_another_process() -> None:
    reward = pickle.loads(pickle.dumps(Reward("bench.gpu.problems:digits")))
    assert reward([[{"content": "12ab"}], [{"content": "7"}]], ["3", "7"], prompts=[]) == [0.5, 1.0]


# -- the server --------------------------------------------------------------------------------------------------------

STAND_IN = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

mode, arguments = sys.argv[1], sys.argv[2:]
print("started with", arguments, os.environ["VLLM_SERVER_DEV_MODE"], flush=True)
if mode == "fails":
    sys.exit("no memory")
if mode == "hangs":
    time.sleep(60)
adapters = {}

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, content, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def do_GET(self):
        loaded = [{"id": name, "parent": "base"} for name in adapters]
        self.answer({"data": [{"id": "base", "parent": None}, *loaded]} if self.path == "/v1/models" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self.path == "/die":
            os._exit(3)
        if self.path == "/v1/load_lora_adapter":
            adapters[body["lora_name"]] = open(os.path.join(body["lora_path"], "adapter_config.json")).read()
        elif self.path == "/v1/unload_lora_adapter":
            del adapters[body["lora_name"]]
        elif self.path == "/v1/completions":
            if body["model"] not in adapters:
                return self.answer({"error": "no such model"}, 404)
            if len(body["prompt"]) > int(os.environ.get("VLLM_MAX_COMPLETION_PROMPTS", "1024")):
                return self.answer({"error": "too many prompts"}, 400)
            token = int(adapters[body["model"]]) + (1 if body["temperature"] else 0)
            choices = [{"index": i, "token_ids": [token] * len(each)} for i, each in enumerate(body["prompt"])]
            return self.answer({"choices": choices[::-1]})
        self.answer({})

HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


def server_of(tmp_path: Path, mode: str = "serves", timeout_s: float = 30.0) -> Server:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    program = (sys.executable, str(script), mode)
    return Server("model", log=tmp_path / "log", timeout_s=timeout_s, arguments=["--max-loras", "6"], program=program)


def adapter_of(tmp_path: Path, version: int) -> Path:
    folder = tmp_path / f"adapter-{version}"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(str(version))
    return folder


def test_a_server_answers_by_its_adapters_and_is_stopped_at_the_end(tmp_path: Path) -> None:
    with server_of(tmp_path) as server:
        process = server._process
        assert process is not None
        server.load("version-7", adapter_of(tmp_path, 7))
        server.load("version-8", adapter_of(tmp_path, 8))
        assert server.adapters() == ["version-7", "version-8"]
        assert server.answers([[1], [1, 2]], "version-7", 0.0, 4) == [[7], [7, 7]]
        assert server.answers([[1]], "version-8", 1.0, 4) == [[9]]
        assert len(server.answers([[1]] * 1_319, "version-8", 0.0, 4)) == 1_319  # more than vLLM takes by default
        server.clear()
        assert server.adapters() == []
        with pytest.raises(RuntimeError, match=r"404, .*no such model"):
            server.answers([[1]], "version-7", 0.0, 4)
    assert process.poll() is not None
    assert "'--enable-lora', '--max-loras', '6'] 1" in (tmp_path / "log").read_text()


def test_a_server_that_does_not_start_says_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ended with 1.*no memory"), server_of(tmp_path, "fails"):
        pass
    with pytest.raises(TimeoutError, match=r"(?s)not ready.*started with"), server_of(tmp_path, "hangs", 2.0):
        pass


def test_a_server_that_ends_by_itself_ends_the_run(tmp_path: Path) -> None:
    def wait() -> None:
        with server_of(tmp_path) as server:
            with contextlib.suppress(OSError):
                server._ask("/die")
            for _ in range(300):  # as TRL waits for answers
                time.sleep(0.1)
            pytest.fail("nobody has said that the server is gone")

    with pytest.raises(RuntimeError, match="has ended by itself"):
        wait()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends it")
def test_a_server_ends_with_the_process_that_has_started_it(tmp_path: Path) -> None:
    wanted = server_of(tmp_path)
    code = (
        "import sys, time; from pathlib import Path; from bench.gpu.vllm_server import Server\n"
        f"log, program = Path({str(tmp_path / 'log')!r}), {wanted.command[:3]!r}\n"
        "with Server('model', log=log, timeout_s=30.0, program=program) as it:\n"
        "    print(it._process.pid, flush=True); time.sleep(60)"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 20.0
    while is_running(server):
        assert time.monotonic() < until, "the server has outlived its parent"
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Whether a process that nobody has waited for yet does anything."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_the_room_for_adapters_is_one_that_vllm_has() -> None:
    assert (served_rank(4), served_rank(32), served_rank(33)) == (8, 32, 64)
    with pytest.raises(ValueError, match="rank 512 at most"):
        served_rank(513)


def test_settings_with_the_same_share_share_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []

    class Fake:
        def __init__(self, memory: float, adapters: int) -> None:
            self.name = (memory, adapters)

        def __enter__(self) -> Fake:
            happened.append(("starts", *self.name))
            return self

        def __exit__(self, *error: object) -> None:
            happened.append(("stops", *self.name))

        def clear(self) -> None:
            happened.append("clear")

    monkeypatch.setattr(trl_async_gsm8k, "start", lambda _, memory, adapters: Fake(memory, adapters))
    wanted = [Setting(8, True), Setting(16, True, stale=7), Setting(8, True, memory=0.5)]
    with Servers(options(tmp_path), wanted) as servers:
        for setting in wanted:
            servers.get(setting)
    assert happened == [("starts", 0.3, 9), "clear", ("stops", 0.3, 9), ("starts", 0.5, 6), ("stops", 0.5, 6)]


def test_the_server_gets_its_share_and_room_for_every_version_that_may_be_asked_for(tmp_path: Path) -> None:
    given = " ".join(trl_async_gsm8k.start(options(tmp_path, "--server-arguments=--max-num-seqs 512"), 0.4, 6).command)
    for words in (
        "--model Qwen/Qwen2.5-Coder-1.5B-Instruct", "--enable-lora", "--max-lora-rank 32", "--max-loras 6",
        "--gpu-memory-utilization 0.4", "--max-model-len 912", "--dtype bfloat16", "--max-num-seqs 512",
    ):  # fmt: skip
        assert words in given


# -- evaluations -------------------------------------------------------------------------------------------------------


class Tokenizer:
    def apply_chat_template(self, messages: list[Any], **_: Any) -> list[int]:
        return [0] * len(messages)

    def decode(self, tokens: list[int], **_: Any) -> str:
        return str(tokens[0])


def test_kept_versions_are_scored_after_the_run_the_last_one_first(tmp_path: Path) -> None:
    recorder = Run(tmp_path, seconds=12.0, every=2).recorder
    problems = tmp_path / "problems"
    problems.mkdir()
    lines = [{"messages": [{}] * length, "answer": "5"} for length in (1, 3)]
    (problems / "test.jsonl").write_text("\n".join(map(json.dumps, lines)))
    chosen = options(tmp_path, "--problems", str(problems), "--max-tokens", "3", "--reward", f"{__name__}:equal")
    asked: list[Any] = []
    with server_of(tmp_path) as server:
        trl_async_gsm8k.evaluate(
            server, Tokenizer(), recorder, chosen, lambda: asked.append(len(recorder.points)), asked.append
        )
        assert server.adapters() == []
    assert asked == [1, "version-4", 2, 3]  # saved each time; the whole test after the first
    assert [(point["version"], point["score"]) for point in recorder.points] == [(0, 0.0), (2, 0.0), (4, 1.0)]
    assert {point["truncated"] for point in recorder.points} == {0.5}


def equal(prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)


# -- the sweep ---------------------------------------------------------------------------------------------------------


def test_the_setting_with_the_most_tokens_a_second_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"8:on:0.3": 100.0, "16:on:0.3": 300.0, "8:on:0.5": 200.0}
    tried, ran = [], []

    def attempt(_: Any, setting: Setting, servers: Servers) -> dict[str, Any]:
        tried.append(str(setting))
        if setting.checkpointing:
            return {"tokens_per_s": rates[str(setting)], "length_mean": 9.0, "dropped_share": 0.1}
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(trl_async_gsm8k, "try_setting", attempt)
    monkeypatch.setattr(trl_async_gsm8k, "run", lambda *given, swept_s: ran.append((given[1], len(given[3]))))
    chosen = options(tmp_path, "--sweep", "8:on:0.5,8:on,64:off,16:on")
    trl_async_gsm8k.sweep_and_run(chosen, Cells(tmp_path, resume=False))
    assert tried == ["8:on:0.3", "64:off:0.3", "16:on:0.3", "8:on:0.5"]  # by share
    assert ran == [(Setting(16, True), 4)]
    assert fastest([{"setting": "8:on", "failed": "no"}]) is None
    assert trl_gsm8k.sweep_records(chosen) == []  # those are not of TRL's other trainer


def test_a_run_without_a_setting_or_a_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no sweep to choose from"):
        trl_async_gsm8k.main(["--out", str(tmp_path)])


# -- attention ---------------------------------------------------------------------------------------------------------


def test_queries_see_what_comes_before_them_and_no_other_sequence() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(7, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    ends_q, ends_k = torch.tensor([0, 3, 7]), torch.tensor([0, 5, 9])  # the first has a past of two keys
    out = tree_attention.flash_attn_varlen_func(query, key, value, ends_q, ends_k, 4, 5, causal=True)
    for row, start, seen in ((0, 0, 3), (2, 0, 5), (3, 5, 6), (6, 5, 9)):
        for head in range(4):
            keys, values = key[start:seen, head // 2], value[start:seen, head // 2]
            weights = (keys @ query[row, head] / 8**0.5).softmax(0)
            assert torch.allclose(out[row, head], weights @ values, atol=1e-5)


def test_what_stands_in_for_the_kernel_is_checked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = types.SimpleNamespace(_flash_attn=None)
    monkeypatch.setitem(sys.modules, "trl", types.ModuleType("trl"))
    monkeypatch.setitem(sys.modules, "trl.experimental", types.ModuleType("trl.experimental"))
    monkeypatch.setitem(sys.modules, "trl.experimental.async_grpo", types.SimpleNamespace(packing=packing))
    tree_attention.install("cpu", torch.float32)
    assert packing._flash_attn().flash_attn_varlen_func is tree_attention.flash_attn_varlen_func
    with pytest.raises(NotImplementedError, match="without a window"):
        tree_attention.flash_attn_varlen_func(*[torch.zeros(1, 1, 8)] * 3, *[torch.tensor([0, 1])] * 2, 1, 1)
    monkeypatch.setattr(tree_attention, "difference", lambda device, dtype: 0.5)
    with pytest.raises(RuntimeError, match="cannot stand in"):
        tree_attention.install("cpu", torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_size", [64, 128])
def test_flash_attention_on_a_device_is_that_of_the_loop(head_size: int) -> None:
    assert tree_attention.difference("cuda", torch.bfloat16, head_size) < 0.05


def test_links_need_no_copy(tmp_path: Path) -> None:
    """The clock runs while a version is kept."""
    recorder = Recorder(every=1, seconds=1.0, completions=4, now=lambda: 0.0)
    published = adapter_of(tmp_path, 0)
    recorder.train_begins(0.0, published)
    assert os.path.samefile(published / "adapter_config.json", recorder.kept[0] / "adapter_config.json")
