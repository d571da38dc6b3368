"""Whole runs in one process, over the real engine and trainer and a tiny model with hardly trained weights."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from interruption_cases import Dies, interrupt_during
from rich.console import Console
from run_cases import assert_verifies, equal, policy, recipe, rows, run, story, write_task
from transformers import AutoModelForCausalLM, AutoTokenizer

import stretto.setup.factories as parts_module
from stretto.assembly.check import check
from stretto.cli import main
from stretto.engines.native.engine import NativeEngine
from stretto.environments.reward_pool import RewardPool
from stretto.errors import JournalError, RecipeError, RunError, TrainerError
from stretto.local.components import LocalComponents
from stretto.models.checksums import checksum
from stretto.models.loading import second_tree
from stretto.observe.progress import Silent
from stretto.observe.summary import summary_table
from stretto.recipe.reading import load_recipe
from stretto.recipe.schema import Recipe
from stretto.run.evaluation import Evaluator
from stretto.store.reader import JournalReader
from stretto.training.trainer import LocalTrainer
from stretto.types import Batch, EvaluationResult, UpdateReport

SUMMARY_KEYS = {
    *("steps", "wall_seconds", "tokens", "tokens_per_second", "eval_before", "eval_after", "staleness"),
    *("trainer_idle_share", "rollout_idle_share", "row_idle_share", "dropped_trajectories", "failed_trajectories"),
    *("mixed_version_trajectories", "length_ratio", "mismatch_kl", "groups_without_signal", "stopped"),
}
TOKENS = torch.arange(40)[None] % 90 + 3


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[LocalTrainer]:
    """The trainers that runs made."""
    made: list[LocalTrainer] = []

    class Kept(LocalTrainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(parts_module, "LocalTrainer", Kept)
    return made


# -- laws and paradigms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_without_staleness_multi_version_is_synchronous_bit_for_bit(model: Path, tmp_path: Path, lora: bool) -> None:
    runs = {
        "synchronous": ['rollout.paradigm="synchronous"'],
        "again": ['rollout.paradigm="synchronous"'],
        "multi-version": ["rollout.staleness=0"],
        "few rows": ["rollout.staleness=0", "rollout.rows=5", "rollout.prefill_tokens=16"],
    }
    for name, overrides in runs.items():
        run(recipe(model, tmp_path, *overrides, lora=lora), tmp_path / name)
        assert_verifies(tmp_path / name)
    first = story(tmp_path / "synchronous")
    assert len(set(first[0])) == 4, "every update changed the weights"
    for name in runs:
        assert story(tmp_path / name) == first, name
        assert equal(policy(tmp_path / name), policy(tmp_path / "synchronous")), name


@pytest.mark.parametrize("paradigm", ["synchronous", "one-step-off", "partial", "drop", "multi-version"])
def test_every_paradigm_trains_and_verifies(
    model: Path, tmp_path: Path, paradigm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f'rollout.paradigm="{paradigm}"', "evaluation.every=1", "rollout.max_tokens=24"]
    if paradigm == "drop":
        overrides += ["rollout.staleness=1", "rollout.in_flight=9", "rollout.rows=36"]
    summary = run(recipe(model, tmp_path, *overrides), tmp_path / "run")
    assert summary.keys() >= SUMMARY_KEYS
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    json.dumps(summary, allow_nan=False)
    assert summary["staleness"].keys() == {"mean", "max", "histogram"}
    assert summary["steps"] == 3
    assert sum(summary["staleness"]["histogram"].values()) == summary["trained_trajectories"] == 36
    assert main(["verify", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert ("broken by paradigm" in said) == (paradigm in ("partial", "drop")), said
    for share in ("trainer_idle_share", "rollout_idle_share", "row_idle_share"):
        assert 0.0 <= summary[share] <= 1.0, share
    ended = dict(rows(tmp_path / "run", "SELECT state, COUNT(*) FROM trajectories GROUP BY 1"))
    assert ended.get("dropped", 0) == summary["dropped_trajectories"]
    assert sum(ended.values()) == ended["trained"] + ended.get("dropped", 0)
    assert abs(summary["mismatch_kl"]) < 1e-6
    tokens = rows(tmp_path / "run", "SELECT SUM(num_tokens) FROM completions JOIN members USING (trajectory)")
    assert tokens == [(summary["tokens"],)]


def test_several_versions_are_live_at_once_and_none_is_older_than_the_bound(model: Path, tmp_path: Path) -> None:
    made = recipe(model, tmp_path, "training.steps=6", "rollout.max_tokens=40", "rollout.in_flight=6")
    summary = run(made, tmp_path / "run")
    assert_verifies(tmp_path / "run")
    ages = {int(age) for age in summary["staleness"]["histogram"]}
    assert max(ages) > 0
    assert max(ages) <= made.plan.staleness == 2
    found = rows(tmp_path / "run", "SELECT COUNT(DISTINCT version) FROM completions")
    assert found[0][0] > 2


def test_evaluations_say_which_version_they_measured(model: Path, tmp_path: Path) -> None:
    made = recipe(model, tmp_path, 'rollout.paradigm="synchronous"', "training.steps=4", "evaluation.every=2")
    summary = run(made, tmp_path / "run")
    assert (summary["eval_before_version"], summary["eval_after_version"]) == (0, 4)
    with JournalReader(tmp_path / "run") as reader:
        found = [(record.kind, record.version, record.num) for record in reader.evaluations()]
    assert found == [("before", 0, 2), ("during", 2, 2), ("after", 4, 2)]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines if line["kind"] == "evaluation"] == [0, 2, 4]
    assert [line["update"] for line in lines if line["kind"] == "update"] == [0, 1, 2, 3]


def test_an_evaluation_has_its_score_and_the_greedy_one_that_temperature_0_gives_and_neither_changes_the_training(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    always = ['rollout.paradigm="synchronous"', "training.steps=2", "evaluation.every=1", "evaluation.prompts=4"]
    recipe(model, tmp_path)

    def train(name: str, change: str) -> list[dict[str, Any]]:
        words = [word for each in (*always, change) for word in ("--set", each)]
        assert main(["train", str(tmp_path / "recipe.toml"), *words, "--out", str(tmp_path / name)]) == 0
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == "evaluation"]

    alone = train("alone", "evaluation.temperature=0")
    capsys.readouterr()
    both = train("both", "evaluation.greedy=true")
    said = capsys.readouterr().out
    assert [line["version"] for line in both] == [0, 1, 2]
    names = ("score", "num_scored", "num_failed", "mean_tokens")
    assert [line["greedy"] for line in both] == [{name: line[name] for name in names} for line in alone]
    assert all(line["score"] != line["greedy"]["score"] for line in both), "otherwise this test shows nothing"
    assert [line["greedy"] for line in alone] == [None] * 3
    assert story(tmp_path / "both") == story(tmp_path / "alone"), "nothing of an evaluation is trained on"
    summary = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert (summary["eval_before"], summary["eval_before_greedy"]) == (both[0]["score"], alone[0]["score"])
    assert (summary["eval_after"], summary["eval_after_greedy"]) == (both[2]["score"], alone[2]["score"])
    scores = f"{both[1]['score']:.3f} on 4 prompts; greedy {alone[1]['score']:.3f} on 4 prompts"
    assert f"evaluation of version 1: {scores}" in said
    assert "held-out score after, greedy" in said
    assert main(["show", str(tmp_path / "both")]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["during", "1", f"{both[1]['score']:.4f}", f"{alone[1]['score']:.4f}", "4"] in [row[:-1] for row in shown]
    assert_verifies(tmp_path / "both")


def test_too_few_rows_to_hold_any_out_is_refused_before_anything_is_made(model: Path, tmp_path: Path) -> None:
    write_task(tmp_path, num_rows=4)
    with pytest.raises(
        RecipeError, match=r"`evaluation.prompts = 2`.*`task.evaluation_path`.*`evaluation.prompts = 0`"
    ):
        run(recipe(model, tmp_path, "evaluation.every=1"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_fewer_held_out_rows_than_asked_is_said(model: Path, tmp_path: Path) -> None:
    class Heard(Silent):
        def __init__(self) -> None:
            self.said: list[str] = []

        def message(self, text: str) -> None:
            self.said.append(text)

    heard = Heard()
    run(recipe(model, tmp_path, "evaluation.prompts=20", "training.steps=1"), tmp_path / "run", observer=heard)
    assert any("4 prompts are held out" in text and "`evaluation.prompts = 20`" in text for text in heard.said)


@pytest.mark.parametrize("option", ["rollout.max_tokens", "evaluation.max_tokens"])
def test_completions_that_leave_no_room_for_a_prompt_are_refused_by_name(
    model: Path, tmp_path: Path, option: str
) -> None:
    with pytest.raises(RecipeError, match=rf"`{option} = 1000000` leaves no room for a prompt"):
        run(recipe(model, tmp_path, f"{option}=1000000"), tmp_path / "run")


@pytest.mark.parametrize("memory", [["rollout.kv_tokens=64"], ["rollout.kv_tokens=128", "runtime.instances=2"]])
@pytest.mark.parametrize("file", ["prompts.jsonl", "held_out.jsonl"])
def test_a_prompt_that_the_memory_of_the_engine_cannot_hold_is_refused_at_the_start(
    model: Path, tmp_path: Path, file: str, memory: list[str]
) -> None:
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "9+9=", "answer": 18}\n')
    with (tmp_path / file).open("a") as rows_of_file:
        rows_of_file.write('{"prompt": "' + "1" * 53 + '", "answer": 1}\n')
    overrides = ['task.evaluation_path="held_out.jsonl"', *memory]
    with pytest.raises(RecipeError, match=r"its prompt has 53 tokens, more than the 52"):
        run(recipe(model, tmp_path, *overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_by_default_the_engine_can_hold_every_prompt_that_was_checked(model: Path, tmp_path: Path) -> None:
    write_task(tmp_path, num_rows=300)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "' + "1" * 2000 + '", "answer": 1}\n')
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "' + "1" * 2500 + '", "answer": 18}\n')
    made = recipe(model, tmp_path, 'task.evaluation_path="held_out.jsonl"', "rollout.rows=1")
    parts = LocalComponents.build(made, str(model))
    assert parts.engines[0].capacity.kv_tokens >= 2500 + 12
    parts.engines[0].close()


def test_a_run_that_is_interrupted_in_its_last_evaluation_is_complete(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Evaluator.evaluate

    async def interrupted(self: Evaluator, engine: Any, version: int, moment: Any, checksum: Any) -> Any:
        if moment == "after":
            raise KeyboardInterrupt
        return await original(self, engine, version, moment, checksum)

    monkeypatch.setattr(Evaluator, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(recipe(model, tmp_path), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["stopped"], summary["eval_after"]) == (3, False, None)
    assert policy(tmp_path / "run")
    Console(file=io.StringIO()).print(summary_table(summary))
    with JournalReader(tmp_path / "run") as reader:
        assert [session.outcome for session in reader.sessions()] == ["finished"]
    assert_verifies(tmp_path / "run")


def test_an_evaluation_in_which_nothing_could_be_scored_has_no_score(model: Path, tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "9+9=", "answer": -1}\n')
    made = recipe(model, tmp_path, "training.steps=1", 'task.evaluation_path="held_out.jsonl"', reward="held_out_fail")
    summary = run(made, tmp_path / "run")
    assert (summary["eval_before"], summary["eval_after"]) == (None, None)
    assert summary["evaluations"][0]["num_failed"] == 1
    assert main(["show", str(tmp_path / "run")]) == 0


# -- what comes out ----------------------------------------------------------------------------------------------------


def own_logits(trainer: LocalTrainer) -> torch.Tensor:
    tree: Any = second_tree(trainer.model, share=True)
    tree.config._attn_implementation = "sdpa"
    with torch.no_grad():
        return tree(TOKENS).logits


def test_the_policy_of_a_full_run_is_the_last_version_and_loads_with_transformers(
    model: Path, tmp_path: Path, trainers: list[LocalTrainer]
) -> None:
    run(recipe(model, tmp_path, lora=False), tmp_path / "run")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
    with JournalReader(tmp_path / "run") as reader:
        assert checksum(dict(loaded.named_parameters())) == reader.versions()[3]
    assert torch.allclose(loaded(TOKENS).logits, own_logits(trainers[0]), atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "policy")
    assert tokenizer.decode(tokenizer.encode("4+3*17?")) == "4+3*17?"


def test_the_policy_of_a_lora_run_is_the_last_version_and_loads_with_peft(
    model: Path, tmp_path: Path, trainers: list[LocalTrainer]
) -> None:
    run(recipe(model, tmp_path), tmp_path / "run")
    base = AutoModelForCausalLM.from_pretrained(model)
    untrained = base(TOKENS).logits
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "policy")
    expected = own_logits(trainers[0])
    assert torch.allclose(loaded(TOKENS).logits, expected, atol=1e-5)
    assert not torch.allclose(untrained, expected, atol=1e-5)
    with JournalReader(tmp_path / "run") as reader:
        assert trainers[0].weights(3).checksum == reader.versions()[3]


def test_engine_and_trainer_hold_the_base_of_a_lora_run_once(model: Path, tmp_path: Path) -> None:
    parts = LocalComponents.build(recipe(model, tmp_path), str(model))
    engine = {p.data_ptr(): name for name, p in parts.engines[0]._slots.trees[0].named_parameters()}
    frozen = {p.data_ptr() for p in parts.trainer.model.parameters() if not p.requires_grad}
    assert frozen
    assert frozen <= engine.keys()
    parts.engines[0].close()


def test_groups_whose_rewards_are_all_equal_are_counted_and_change_nothing(model: Path, tmp_path: Path) -> None:
    summary = run(recipe(model, tmp_path, reward="constant", lora=False), tmp_path / "run")
    assert summary["groups_without_signal"] == 9
    trained = policy(tmp_path / "run")
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())
    with JournalReader(tmp_path / "run") as reader:
        assert len(set(reader.versions().values())) == 1


def test_a_task_of_reasoning_gym_trains(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "gym.toml"
    path.write_text(
        f'[model]\npath = "{model}"\nlora = {{ rank = 2 }}\n[task]\ntype = "reasoning-gym"\nname = "chain_sum"\n'
        "size = 20\n[rollout]\nprompts = 2\ngroup = 2\nmax_tokens = 8\n[training]\nsteps = 1\n"
        "[evaluation]\nprompts = 2\n[runtime]\nengine_threads = 1\ntrainer_threads = 1\n"
    )
    assert run(load_recipe(path), tmp_path / "run")["steps"] == 1
    assert_verifies(tmp_path / "run")


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_rewards_that_raise_hang_or_return_nonsense_are_counted_and_the_run_goes_on(
    model: Path, tmp_path: Path
) -> None:
    write_task(tmp_path, num_rows=12)  # four of them can be scored, so two updates see every one
    overrides = ["task.reward_seconds=0.1", "rollout.retries=0", "evaluation.prompts=0", "training.steps=2"]
    summary = run(recipe(model, tmp_path, *overrides, reward="troubled"), tmp_path / "run")
    assert_verifies(tmp_path / "run")
    assert summary["steps"] == 2
    assert summary["failed_trajectories"] > 0
    failed = rows(tmp_path / "run", "SELECT trajectory, error FROM trajectories WHERE state = 'failed'")
    assert len(failed) == summary["failed_trajectories"]
    said = " ".join(error for _, error in failed)
    for reason in ("no idea", "nan", "three", "`task.reward_seconds = 0.1`"):
        assert reason in said, reason
    groups = rows(
        tmp_path / "run",
        "SELECT COUNT(*) FROM (SELECT group_id FROM trajectories GROUP BY 1 HAVING SUM(state <> 'failed') = 0)",
    )
    assert groups == [(summary["replaced_groups"],)]
    assert summary["replaced_groups"] > 0


def test_rewards_that_cannot_be_trained_on_are_counted_and_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    overrides = ["rollout.retries=1", "evaluation.prompts=4", "training.steps=2"]
    summary = run(recipe(model, tmp_path, *overrides, reward="huge"), tmp_path / "run")
    assert_verifies(tmp_path / "run")
    assert summary["steps"] == 2
    assert summary["failed_trajectories"] > 0
    assert summary["scoring_retries"] == summary["failed_trajectories"], "tried again, and then failed"
    failed = rows(tmp_path / "run", "SELECT DISTINCT error FROM trajectories WHERE state = 'failed'")
    beyond = "beyond 1e+09, the largest reward that can be trained on: scale the rewards"
    assert failed == [(f"`our_rewards:huge` returned 1e+101 (float), {beyond}",)]
    assert all(each["num_scored"] + each["num_failed"] == 4 for each in summary["evaluations"])
    assert all(each["num_failed"] > 0 for each in summary["evaluations"])


def test_a_variable_to_pass_that_is_not_set_is_told_before_anything_is_built(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUR_KEY", raising=False)
    made = recipe(model, tmp_path, 'task.pass_env=["OUR_KEY"]')
    with pytest.raises(RecipeError, match=r"`task\.pass_env` names `OUR_KEY`, which is not set"):
        run(made, tmp_path / "run")
    with pytest.raises(RecipeError, match=r"`task\.pass_env` names `OUR_KEY`, which is not set"):
        check(made)
    assert not (tmp_path / "run").exists()


def test_a_reward_sees_the_variables_that_the_recipe_names_and_no_other_secret(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_KEY", "secret")
    monkeypatch.setenv("ANOTHER_KEY", "another secret")
    (tmp_path / "our_rewards.py").write_text(
        "import os\ndef keys(prompt, completion):\n"
        '    assert "ANOTHER_KEY" not in os.environ\n    return os.environ["OUR_KEY"] == "secret"\n'
    )
    made = recipe(model, tmp_path, 'task.pass_env=["OUR_KEY"]', "training.steps=1", reward="keys")
    summary = run(made, tmp_path / "run")
    assert (summary["failed_trajectories"], summary["evaluations"][0]["score"]) == (0, 1.0)
    assert all(b"secret" not in path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())


def test_completions_that_wait_for_slow_rewards_longer_than_one_may_take_fail_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RewardPool, "longest_s", 0.3)
    overrides = ["rollout.prompts=6", "training.steps=2", "runtime.stall_seconds=0.3", "evaluation.every=1"]
    overrides += ["rollout.retries=0", "evaluation.prompts=4"]
    summary = run(recipe(model, tmp_path, *overrides, reward="slow"), tmp_path / "run")
    assert_verifies(tmp_path / "run")
    assert (summary["failed_trajectories"], summary["trained_trajectories"]) == (0, 48), (
        "an update of them takes one worker 1.4 s"
    )
    assert [(each["num_scored"], each["num_failed"]) for each in summary["evaluations"]] == [(4, 0)] * 3


def test_an_update_that_fails_ends_the_run_by_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LocalTrainer.update

    def failing(self: LocalTrainer, batch: Batch) -> UpdateReport:
        if batch.update == 1:
            raise RuntimeError("out of memory")
        return original(self, batch)

    monkeypatch.setattr(LocalTrainer, "update", failing)
    with pytest.raises(TrainerError, match=r"update 1 failed: RuntimeError: out of memory"):
        run(recipe(model, tmp_path), tmp_path / "run")
    assert_verifies(tmp_path / "run")
    assert not (tmp_path / "run" / "policy").exists()


def test_bad_input_is_an_error_by_name_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "' + "1" * 5000 + '", "answer": 1}\n')
    with pytest.raises(RecipeError, match=r"its prompt has 5,000 tokens, more than the 4,084"):
        run(recipe(model, tmp_path), tmp_path / "run")
    (tmp_path / "prompts.jsonl").write_text("")
    with pytest.raises(RecipeError, match="has no rows"):
        run(recipe(model, tmp_path), tmp_path / "run")
    (tmp_path / "prompts.jsonl").unlink()
    with pytest.raises(RecipeError, match="is not a file"):
        run(recipe(model, tmp_path), tmp_path / "run")
    write_task(tmp_path)
    with pytest.raises(RecipeError, match="leaves no room for a prompt"):
        run(recipe(model, tmp_path, "rollout.max_tokens=4096"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_reward_function_that_is_not_there_is_an_error_by_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="absent"):
        run(recipe(model, tmp_path, reward="absent"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_ends_the_run_by_name_and_it_goes_on_when_there_is_room(
    model: Path, tmp_path: Path
) -> None:
    made = recipe(model, tmp_path, "training.steps=20", "evaluation.prompts=0")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Fills(Silent):
        """After the second update no file may be larger than the largest one: then the first update is on the disk."""

        def updated(self, line: Mapping[str, Any]) -> None:
            if line["update"] == 1:
                sizes = [(tmp_path / "run" / "journal.sqlite-wal").stat().st_size]
                for path in (tmp_path / "run" / "versions").iterdir():
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile, as nothing needs it
                        sizes.append(path.stat().st_size)
                resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes), hard))

    try:
        with pytest.raises(JournalError, match=r"journal.sqlite` cannot be written: .*continue with `--resume`"):
            run(made, tmp_path / "run", observer=Fills())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_verifies(tmp_path / "run")
    with JournalReader(tmp_path / "run") as reader:
        assert reader.num_updates() > 0
    assert run(made, tmp_path / "run", resume=True)["steps"] == 20
    assert_verifies(tmp_path / "run")


def test_a_policy_that_cannot_be_written_is_an_error_by_name(model: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
        with pytest.raises(RunError, match=r"the trained policy cannot be written to .*policy"):
            run(
                recipe(
                    model,
                    tmp_path,
                    "training.steps=1",
                    "evaluation.prompts=0",
                    "runtime.durable_versions=false",
                    lora=False,
                ),
                tmp_path / "run",
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_verifies(tmp_path / "run")


# -- stop and resume ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_synchronous_run_that_was_stopped_ends_with_the_same_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    """Stopped in an update nothing is under way at its end, so nothing has to be prefilled again."""
    overrides = ['rollout.paradigm="synchronous"', "training.steps=4"]
    whole = run(recipe(model, tmp_path, *overrides, lora=lora), tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_during(patch, 1)
        stopped = run(recipe(model, tmp_path, *overrides, lora=lora), tmp_path / "run")
    assert (stopped["stopped"], stopped["steps"], stopped["eval_after"]) == (True, 2, None)
    assert_verifies(tmp_path / "run")
    summary = run(recipe(model, tmp_path, *overrides, lora=lora), tmp_path / "run", resume=True)
    assert_verifies(tmp_path / "run")
    assert story(tmp_path / "run") == story(tmp_path / "whole")
    assert equal(policy(tmp_path / "run"), policy(tmp_path / "whole"))
    for name in ("steps", "tokens", "eval_before", "eval_after", "staleness", "length_ratio"):
        assert summary[name] == whole[name], name
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if line["kind"] == "update"] == [0, 1, 2, 3]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_synchronous_run_that_was_stopped_while_it_generated_ends_the_same_to_rounding(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    """What was under way is prefilled again, in other shapes than it was decoded in: the same but for rounding."""
    overrides = ['rollout.paradigm="synchronous"', "evaluation.prompts=0"]
    run(recipe(model, tmp_path, *overrides, lora=lora), tmp_path / "whole")
    original, pressed = NativeEngine.step, False

    def interrupted(self: NativeEngine) -> Any:
        nonlocal pressed
        if not pressed and self.report().longest.get(1, 0) >= 5:  # in the middle of the second batch
            pressed = True
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "step", interrupted)
        assert run(recipe(model, tmp_path, *overrides, lora=lora), tmp_path / "run")["steps"] == 1
    assert rows(tmp_path / "run", "SELECT COUNT(*) > 0 FROM trajectories WHERE state = 'waiting'") == [(1,)]
    run(recipe(model, tmp_path, *overrides, lora=lora), tmp_path / "run", resume=True)
    assert_verifies(tmp_path / "run")
    tokens = "SELECT trajectory, tokens FROM completions ORDER BY 1"
    assert rows(tmp_path / "run", tokens) == rows(tmp_path / "whole", tokens)
    resumed, whole = policy(tmp_path / "run"), policy(tmp_path / "whole")
    for name in whole:
        assert torch.allclose(resumed[name], whole[name], atol=1e-4), name


IMPATIENT = """
import os, signal, sys, time
from pathlib import Path
from stretto.cli import main
from stretto.training.trainer import LocalTrainer

original = LocalTrainer.update

def interrupted(self, batch):
    if batch.update == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        Path("second").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(150)  # a long update, which the first Ctrl-C waits for
    return original(self, batch)

LocalTrainer.update = interrupted
sys.exit(main(["train", "recipe.toml", "--out", "run"]))
"""


def test_a_second_ctrl_c_ends_the_process_at_once(model: Path, tmp_path: Path) -> None:
    made = recipe(model, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", IMPATIENT],
        capture_output=True,
        text=True,
        timeout=140,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    took = time.time() - float((tmp_path / "second").read_text())
    assert done.returncode == 130, done.stderr
    assert took < 15.0, "nothing waits for the update that runs"
    assert "once more ends the process at once" in done.stdout
    assert_verifies(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert run(made, tmp_path / "run", resume=True)["steps"] == 3, "the journal has all that was done"
    assert_verifies(tmp_path / "run")


def slow_steps(patch: pytest.MonkeyPatch) -> None:
    """Have every step of the engine take a while, so that a stop finds trajectories under way."""
    step = NativeEngine.step

    def slow(self: NativeEngine) -> Any:
        time.sleep(0.01)
        return step(self)

    patch.setattr(NativeEngine, "step", slow)


def stop_with_trajectories_under_way(monkeypatch: pytest.MonkeyPatch, made: Recipe, folder: Path) -> None:
    """Runs the recipe until update 1, and stops it there."""
    with monkeypatch.context() as patch:
        interrupt_during(patch, 1)
        slow_steps(patch)
        assert run(made, folder)["stopped"]
    states = dict(rows(folder, "SELECT state, COUNT(*) FROM trajectories GROUP BY 1"))
    assert states.get("waiting", 0) > 0, "nothing was under way; the test shows nothing"


def test_a_run_that_was_stopped_with_trajectories_under_way_goes_on_with_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["training.steps=5", "rollout.max_tokens=60", "rollout.in_flight=9", "rollout.rows=24"]
    stop_with_trajectories_under_way(monkeypatch, recipe(model, tmp_path, *overrides), tmp_path / "run")
    assert_verifies(tmp_path / "run")
    summary = run(recipe(model, tmp_path, *overrides), tmp_path / "run", resume=True)
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == 5
    assert_verifies(tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT COUNT(*), MAX(group_id) FROM groups") == [(15, 14)]
    assert rows(tmp_path / "run", "SELECT DISTINCT state FROM trajectories") == [("trained",)]
    with pytest.raises(RunError, match="is finished"):
        run(recipe(model, tmp_path, *overrides), tmp_path / "run", resume=True)
    assert_verifies(tmp_path / "run")


def test_partial_goes_on_with_suspended_trajectories_under_the_weights_of_the_update_that_was_running(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ['rollout.paradigm="partial"', "rollout.max_tokens=60", "rollout.in_flight=6", "rollout.rows=24"]
    overrides += ["evaluation.prompts=0", "rollout.retries=0"]
    stop_with_trajectories_under_way(monkeypatch, recipe(model, tmp_path, *overrides), tmp_path / "run")
    summary = run(recipe(model, tmp_path, *overrides), tmp_path / "run", resume=True)
    assert summary["failed_trajectories"] == 0
    assert summary["mixed_version_trajectories"] > 0
    assert_verifies(tmp_path / "run")


def test_what_failed_before_a_stop_stays_failed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["rollout.max_tokens=60", "rollout.in_flight=6", "rollout.retries=0", "evaluation.prompts=0"]
    with monkeypatch.context() as patch:
        interrupt_during(patch, 0)
        slow_steps(patch)
        made = recipe(model, tmp_path, *overrides, reward="short_ones_fail")
        assert run(made, tmp_path / "run")["stopped"]
    partly = "SELECT COUNT(*) FROM (SELECT 1 FROM trajectories GROUP BY group_id HAVING SUM(state = 'failed') > 0 "
    partly += "AND SUM(state IN ('waiting', 'running', 'scoring', 'scored')) > 0)"
    assert rows(tmp_path / "run", partly) > [(0,)], "no outstanding group was partly failed; the test shows nothing"
    run(made, tmp_path / "run", resume=True)
    assert_verifies(tmp_path / "run")


def finished(folder: Path) -> Sequence[Any]:
    """The updates that were finished, with what they made and when."""
    return rows(
        folder,
        "SELECT update_id, finished_at, checksum, metrics, COUNT(*) FROM updates JOIN members USING (update_id) "
        "WHERE finished_at IS NOT NULL GROUP BY update_id ORDER BY 1",
    )


def test_a_killed_run_loses_no_update_after_its_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(model, tmp_path, "training.steps=5", "rollout.max_tokens=30", "rollout.in_flight=6")
    with monkeypatch.context() as patch:
        interrupt_during(patch, 1)
        run(made, tmp_path / "run")
    with pytest.raises(KeyError):
        run(made, tmp_path / "run", resume=True, observer=Dies(at=3))
    before = finished(tmp_path / "run")
    assert [row[0] for row in before] == [0, 1, 2, 3]
    assert run(made, tmp_path / "run", resume=True)["steps"] == 5
    assert_verifies(tmp_path / "run")
    assert finished(tmp_path / "run")[:4] == before
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if line["kind"] == "update"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("paradigm", ["synchronous", "one-step-off", "partial", "drop", "multi-version"])
def test_a_run_that_was_killed_goes_on_from_the_last_checkpoint_that_it_made(
    model: Path, tmp_path: Path, paradigm: str
) -> None:
    overrides = [f'rollout.paradigm="{paradigm}"', "training.steps=6", "rollout.max_tokens=30"]
    if paradigm == "drop":
        overrides += ["rollout.staleness=1", "rollout.in_flight=9", "rollout.rows=36"]
    made = recipe(model, tmp_path, *overrides, "runtime.checkpoint_seconds=0.000001")
    with pytest.raises(KeyError):
        run(made, tmp_path / "run", observer=Dies(at=4))
    before = finished(tmp_path / "run")
    assert [row[0] for row in before] == [0, 1, 2, 3, 4]
    summary = run(made, tmp_path / "run", resume=True)
    assert_verifies(tmp_path / "run")
    assert finished(tmp_path / "run")[:5] == before, "what was finished was not done again"
    assert (summary["steps"], summary["trained_trajectories"]) == (6, 72)
    assert summary["wall_seconds"] > 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if line["kind"] == "update"] == list(range(6))
    if paradigm == "synchronous":
        run(recipe(model, tmp_path, *overrides), tmp_path / "whole")
        assert [path.name for path in (tmp_path / "whole" / "checkpoints").iterdir()] == ["000006"]
        assert story(tmp_path / "run") == story(tmp_path / "whole")


def test_an_evaluation_that_a_killed_run_made_after_its_checkpoint_is_recorded_once(
    model: Path, tmp_path: Path
) -> None:
    made = recipe(
        model,
        tmp_path,
        'rollout.paradigm="synchronous"',
        "training.steps=4",
        "evaluation.every=2",
        "runtime.checkpoint_seconds=0.000001",
    )

    class Dies(Silent):
        def evaluated(self, result: EvaluationResult) -> None:
            if result.version == 2:
                checkpoint = tmp_path / "run" / "checkpoints" / "000002"
                while not checkpoint.exists():  # it knows that version 2 is to be evaluated
                    time.sleep(0.01)
                raise KeyError("as if it were killed here")

    with pytest.raises(KeyError):
        run(made, tmp_path / "run", observer=Dies())
    summary = run(made, tmp_path / "run", resume=True)
    in_summary = [(each["version"], each["moment"]) for each in summary["evaluations"]]
    assert [version for version, _ in in_summary] in ([0, 2, 4], [0, 4])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["version"], line["moment"]) for line in lines if line["kind"] == "evaluation"] == in_summary
    with JournalReader(tmp_path / "run") as reader:
        recorded = [(record.version, record.kind) for record in reader.evaluations()]
    assert [version for version, _ in recorded] == [0, 2, 4], "each that was due once, made or skipped"
    assert [each for each in recorded if each[1] != "skipped"] == in_summary
    assert summary["evaluations_skipped"] == len(recorded) - len(in_summary)


def test_another_recipe_cannot_resume_and_changes_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_during(patch, 0)
        run(recipe(model, tmp_path), tmp_path / "run")
    before = story(tmp_path / "run")
    with pytest.raises(RunError, match=r"`rollout.temperature` is 0.1, and the run in .* was started with 1.0: traj"):
        run(recipe(model, tmp_path, "rollout.temperature=0.1"), tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=r"`seed` is .*, and the run in .* was started with 5"):
        run(recipe(model, tmp_path, "seed=6"), tmp_path / "run", resume=True)
    with pytest.raises(RunError, match="exists already"):
        run(recipe(model, tmp_path), tmp_path / "run")
    assert story(tmp_path / "run") == before
    assert run(recipe(model, tmp_path, "runtime.stall_seconds=50.0"), tmp_path / "run", resume=True)["steps"] == 3
    assert_verifies(tmp_path / "run")


def test_ctrl_c_stops_the_command_at_an_update_boundary_and_resume_finishes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    recipe(model, tmp_path)
    steps = 40
    command = ["train", "recipe.toml", "--set", f"training.steps={steps}", "--out", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 240
        while not (folder / "metrics.jsonl").exists() or '"update"' not in (folder / "metrics.jsonl").read_text():
            assert process.poll() is None, process.stdout.read() if process.stdout else ""
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "stopping at the next update boundary" in said
    stopped = json.loads((folder / "summary.json").read_text())
    assert 0 < stopped["steps"] < steps
    assert f"stopped after {stopped['steps']} of {steps} updates" in said
    assert main(["verify", str(folder)]) == 0
    assert main([*command, "--resume"]) == 0
    assert main(["verify", str(folder)]) == 0
    assert main(["show", str(folder), "--update", str(steps - 1)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("try next: ") and f" verify {folder}" in line for line in lines)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["steps"], summary["trained_trajectories"]) == (steps, steps * 12)
    with JournalReader(folder) as reader:
        assert reader.num_updates() == steps
        assert reader.num_groups() == steps * 3, "no group is skipped, none is drawn again"
