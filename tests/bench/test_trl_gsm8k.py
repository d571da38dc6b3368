"""TRL's side of GSM8K: its clock, its settings and its sweep, against stand-ins with the interfaces that it uses."""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benches are no part of the package

from bench.gpu import trl_gsm8k
from bench.gpu.cells import Cells
from bench.gpu.problems import Score
from bench.gpu.trl_gsm8k import Recorder, Setting, SharedVllm, fastest

# -- the clock ---------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A run of TRL as its callbacks see it: 2 s of generation and 3 s of training an update, the first of 10 s more."""

    def __init__(self, seconds: float, every: int, last: int = 100) -> None:
        self.clock, self.trained, self.saved = Clock(), 0, list[dict[str, Any]]()
        self.recorder = Recorder(
            self.evaluated, reward=lambda prompt, text, answer: float(text == answer), every=every, seconds=seconds,
            max_tokens=4, swept_s=30.0, saved=self.saved.append, now=self.clock,
        )  # fmt: skip
        self.recorder.train_begins(100.0)
        for step in range(1, last + 1):
            self.recorder.step_begins()
            self.clock.now += 2.0 if step > 1 else 12.0
            completions = [[{"content": "7"}], [{"content": "8"}]]
            assert self.recorder.reward(completions, [[1, 2], [1, 2, 3, 4]], ["7", "7"], prompts=[]) == [1.0, 0.0]
            self.clock.now += 3.0
            self.trained = step
            if self.recorder.step_ends(step, step == last):
                break

    def evaluated(self) -> Score:
        self.clock.now += 50.0
        return Score(self.trained / 100, 512, 300.0, 0.1)


def test_the_clock_stands_still_during_evaluations_and_the_limit_begins_after_the_first_update() -> None:
    run = Run(seconds=12.0, every=2)
    assert run.trained == 4  # 5, 10 and 15 s after the first update
    points = [(point["version"], point["elapsed_s"], point["after_first_s"]) for point in run.recorder.points]
    assert points == [(0, 0.0, 0.0), (2, 20.0, 5.0), (4, 30.0, 15.0)]
    assert [point["score"] for point in run.recorder.points] == [0.0, 0.02, 0.04]
    assert all(point["seconds"] == 50.0 for point in run.recorder.points)


def test_rates_leave_the_first_update_out_and_start_up_the_sweep() -> None:
    results = Run(seconds=12.0, every=3).recorder.results()
    assert results["startup_s"] == 70.0
    assert results["first_update_s"] == 15.0
    assert (results["updates"], results["wall_s"]) == (4, 30.0)
    assert results["seconds_per_update"] == 5.0
    assert results["tokens_per_s"] == 6 / 5.0
    assert (results["rollout_and_scoring_s_per_update"], results["training_s_per_update"]) == (2.0, 3.0)
    first = results["by_update"][0]
    assert (first["reward_mean"], first["length_mean"], first["length_max"], first["truncated"]) == (0.5, 3.0, 4, 0.5)


def test_the_last_update_is_evaluated_and_every_evaluation_is_saved() -> None:
    run = Run(seconds=1e9, every=4, last=5)
    assert [point["version"] for point in run.recorder.points] == [0, 4, 5]
    assert [len(results["evaluations"]) for results in run.saved] == [1, 2, 3]
    assert "tokens_per_s" not in run.saved[0]


def test_a_run_without_evaluations_asks_for_none() -> None:
    run = Run(seconds=4.0, every=0)
    assert run.recorder.points == []
    assert run.trained == 2


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("32:off", Setting(32, False)),
        ("8:on:liger", Setting(8, True, liger=True)),
        ("64:on:sleep:0.5", Setting(64, True, sleep=True, memory=0.5)),
    ],
)
def test_a_setting_is_read_and_written_alike(text: str, setting: Setting) -> None:
    assert Setting.parse(text) == setting
    assert Setting.parse(str(setting)) == setting
    assert Setting.of(json.loads(json.dumps(setting.parameters()))) == setting


@pytest.mark.parametrize("text", ["", "32", "off", "0:on", "8:maybe", "8:on:fast", "8:on:1.5", "8:on:0"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"`{text}`"):
        Setting.parse(text)


def options(tmp_path: Path, *arguments: str) -> argparse.Namespace:
    return trl_gsm8k.parser_of().parse_args(["--out", str(tmp_path), *arguments])


def test_an_update_is_one_optimizer_step_over_all_completions(tmp_path: Path) -> None:
    wanted = trl_gsm8k.grpo_options(options(tmp_path), Setting(16, False, memory=0.2), 64, 9, tmp_path)
    assert wanted["per_device_train_batch_size"] * wanted["gradient_accumulation_steps"] == 512
    assert (wanted["learning_rate"], wanted["lr_scheduler_type"], wanted["max_steps"]) == (5e-5, "constant", 9)
    assert (wanted["vllm_mode"], wanted["vllm_gpu_memory_utilization"]) == ("colocate", 0.2)
    assert "beta" not in wanted  # as TRL has it
    with pytest.raises(ValueError, match="512 completions an update"):
        trl_gsm8k.grpo_options(options(tmp_path), Setting(24, False), 64, 9, tmp_path)


# -- the sweep ---------------------------------------------------------------------------------------------------------

TIMED = {"seconds_per_update": 1.0, "training_s_per_update": 0.5, "length_mean": 10.0}


def test_the_fastest_setting_of_the_cells_is_chosen(tmp_path: Path) -> None:
    chosen, cells = options(tmp_path), Cells(tmp_path, resume=False)
    timed: dict[str, dict[str, Any]] = {
        "16:off": {"seconds_per_update": 9.0, "training_s_per_update": 3.0, "length_mean": 300.0},
        "32:on": {"seconds_per_update": 12.0, "training_s_per_update": 3.3, "length_mean": 400.0},
    }
    others = {"64:off": {"does_not_fit": "out of memory"}, "8:on:liger": {"failed": "not installed"}}
    assert fastest(trl_gsm8k.sweep_records(chosen)) is None
    for text, made in {**timed, **others}.items():
        cells.write(trl_gsm8k.sweep_cell(chosen, Setting.parse(text)), made)
    records = trl_gsm8k.sweep_records(chosen)
    assert len(records) == 4
    assert fastest(records) == Setting(32, True)  # by seconds of training per token: 3.3 / 400 < 3.0 / 300
    slow = {"seconds_per_update": 20.0, "training_s_per_update": 0.1, "length_mean": 300.0}
    cells.write(trl_gsm8k.sweep_cell(chosen, Setting.parse("64:off:0.5")), slow)
    assert fastest(trl_gsm8k.sweep_records(chosen)) != Setting.parse("64:off:0.5")  # another vLLM: by all seconds


def test_no_setting_is_begun_when_the_time_of_the_sweep_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, tried = [100.0], []

    def attempt(_: Any, setting: Setting) -> dict[str, Any]:
        tried.append(str(setting))
        now[0] += 30.0
        return TIMED

    monkeypatch.setattr(trl_gsm8k, "try_setting", attempt)
    monkeypatch.setattr(trl_gsm8k.time, "time", lambda: now[0])
    chosen = options(tmp_path, "--sweep", "8:on,16:on,32:on", "--no-vllm")
    trl_gsm8k.sweep_here(chosen, Cells(tmp_path, resume=False), until=140.0)
    assert tried == ["8:on:0.3", "8:on:0.3"]  # the first one warms up


def test_settings_of_different_vllms_are_tried_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(trl_gsm8k.subprocess, "run", lambda command, check: started.append(command))
    monkeypatch.setattr(trl_gsm8k, "run", lambda *_, **__: pytest.fail("there is no setting to run"))
    arguments = ["--out", str(tmp_path), "--sweep", "8:on,16:on:0.5,32:on", "--sweep-seconds", "60"]
    with pytest.raises(ValueError, match="no sweep to choose from"):
        trl_gsm8k.main(arguments)
    tried = [command[len(command) - command[::-1].index("--sweep") :][0] for command in started]
    assert tried == ["8:on:0.3,32:on:0.3", "16:on:0.5"]
    assert all("--sweep-until" in command for command in started)


def test_sweep_and_run_share_one_vllm_and_the_run_waits_for_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, waited = [], []
    shared = SharedVllm(512)
    shared.start_s = 20.0
    now = iter([1_000.0, 1_100.0])

    def sweep_here(chosen: argparse.Namespace, cells: Cells, until: float) -> SharedVllm:
        cells.write(trl_gsm8k.sweep_cell(chosen, Setting(8, True)), TIMED)
        return shared

    monkeypatch.setattr(trl_gsm8k, "sweep_here", sweep_here)
    monkeypatch.setattr(trl_gsm8k, "wait_for", waited.append)
    monkeypatch.setattr(trl_gsm8k, "run", lambda *given, swept_s: ran.append((given[1], swept_s)))
    chosen = options(tmp_path, "--sweep", "8:on,16:on", "--after", str(tmp_path / "real"))
    cells = Cells(tmp_path, resume=False)
    monkeypatch.setattr(trl_gsm8k, "time", types.SimpleNamespace(time=lambda: next(now)))
    trl_gsm8k.sweep_and_run(chosen, [], cells)
    assert waited == [tmp_path / "real"]
    assert ran == [(Setting(8, True), 80.0)]


def test_vllm_is_started_once_for_the_most_rows_and_woken_for_the_next_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, woken = [], []

    def make(**wanted: Any) -> Any:
        started.append(wanted)
        return types.SimpleNamespace(wake_up=lambda: woken.append(1))

    module = types.SimpleNamespace(LLM=make)
    monkeypatch.setitem(sys.modules, "trl", types.ModuleType("trl"))
    monkeypatch.setitem(sys.modules, "trl.generation", types.SimpleNamespace(vllm_generation=module))
    shared = SharedVllm(512)
    shared.install()
    first = module.LLM(max_num_seqs=64, enable_sleep_mode=False)
    assert module.LLM(max_num_seqs=64, enable_sleep_mode=False) is first
    assert woken == []
    module.LLM(max_num_seqs=64, enable_sleep_mode=True)
    assert woken == [1]
    assert started == [{"max_num_seqs": 512, "enable_sleep_mode": False}]


def test_what_a_trainer_changes_in_the_models_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("transformers.models.fake.modeling_fake")
    vars(module)["norm"] = "usual"
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def patched() -> None:
        with trl_gsm8k.unpatched():
            vars(module)["norm"] = "patched"
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        patched()
    assert vars(module)["norm"] == "usual"


# -- evaluations -------------------------------------------------------------------------------------------------------


class Generation:
    """vLLM as TRL holds it: greedy it answers with the version that it was last given, sampled with one more."""

    def __init__(self) -> None:
        self.temperature, self.given, self.trained = 1.0, 0, 0

    def sync_weights(self) -> None:
        self.given = self.trained

    def generate(self, prompts: list[list[int]], images: None, num: int) -> tuple[Any, list[list[int]], None, None]:
        token = self.given + (1 if self.temperature else 0)
        return prompts, [[token] * len(prompt) for prompt in prompts], None, None


class Tokenizer:
    def apply_chat_template(self, messages: list[Any], **_: Any) -> list[int]:
        return [0] * len(messages)

    def decode(self, tokens: list[int], **_: Any) -> str:
        return f"\\boxed{{{tokens[0]}}}"


def test_an_evaluation_is_of_the_newest_weights_and_leaves_the_temperature_as_it_was(tmp_path: Path) -> None:
    generation = Generation()
    generation.trained = 7
    trainer = types.SimpleNamespace(
        vllm_generation=generation, processing_class=Tokenizer(), use_vllm=True, _last_loaded_step=3,
        state=types.SimpleNamespace(global_step=4),
    )  # fmt: skip
    lengths_and_answers = [(1, "7"), (3, "7"), (1, "7"), (3, "8")]
    problems = [{"messages": [{}] * length, "answer": answer} for length, answer in lengths_and_answers]
    chosen = options(tmp_path, "--max-tokens", "3")
    greedy = trl_gsm8k.evaluation(trainer, problems, 0.0, chosen)
    assert (greedy.accuracy, greedy.mean_tokens, greedy.truncated) == (0.75, 2.0, 0.5)
    assert generation.temperature == 1.0
    assert trainer._last_loaded_step == 4  # TRL need not merge its adapters again
    both = trl_gsm8k.test_results(trainer, problems, chosen)
    assert (both["after_greedy"], both["after_sampled"]) == (0.75, 0.25)
    assert both["after"]["greedy"]["num_problems"] == 4
