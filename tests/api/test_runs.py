"""A run in its folder: what Python reads from it, whatever became of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from run_cases import recipe, run, write_task
from view_cases import CONFIG, record_extended_run, record_run

import stretto
from stretto.errors import RunError
from stretto.store.verify import verify as findings_of


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which no test changes."""
    folder = tmp_path_factory.mktemp("finished")
    write_task(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        run(recipe(model, folder), folder / "run")
    return folder / "run"


def test_a_finished_run_is_read_as_tables(finished: Path) -> None:
    made = stretto.open_run(str(finished))
    assert (made.outcome, made.stopped, made.name) == ("finished", False, "run")
    assert repr(made) == f"Run({str(finished)!r}, finished)"
    assert made.recipe.training.steps == made.summary["steps"] == 3
    assert made.metrics()["update"] == [0, 1, 2]
    assert made.evaluations()["version"] == [0, 3]
    assert "reward_mean" in repr(made.metrics()).splitlines()[1]
    with pytest.raises(RunError, match="`kind = 'updates'` is no kind of line: use 'update' or 'evaluation'"):
        made.metrics("updates")  # type: ignore[arg-type]


def test_samples_are_chosen_by_update_reward_text_and_number(finished: Path) -> None:
    made = stretto.open_run(finished)
    everything = made.samples()
    assert len(everything) == 36
    assert set(made.samples(1)["update"]) == {1}
    assert list(made.samples(-1)) == list(made.samples(2))
    rewards = sorted(everything["reward"])
    middle = rewards[len(rewards) // 2]
    high, low = made.samples(min_reward=middle), made.samples(max_reward=middle)
    assert len(high) == sum(reward >= middle for reward in rewards)
    assert len(low) == sum(reward <= middle for reward in rewards)
    prompt = everything[0]["prompt"]
    with_prompt = made.samples(text=prompt)
    assert 4 <= len(with_prompt) < 36
    assert all(prompt in row["prompt"] + row["text"] for row in with_prompt)
    assert list(made.samples(limit=5)) == list(everything)[:5]
    with pytest.raises(RunError, match=r"`update = 3` is not in .*: it has updates 0 to 2"):
        made.samples(3)


def test_the_findings_are_those_of_verify_and_print_like_them(finished: Path) -> None:
    made = stretto.open_run(finished).verify()
    assert made.hold
    assert list(made) == findings_of(finished)
    assert str(made).splitlines()[0].startswith("law 1  one voice     holds")
    assert repr(made) == str(made)
    assert [finding.law for finding in stretto.verify(finished)[:2]] == ["1", "2"]


@pytest.mark.parametrize("lora", [True, False])
def test_the_policy_is_the_trained_one_and_is_prompted_as_it_was_trained(
    model: Path, tmp_path: Path, lora: bool
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    run(recipe(model, tmp_path, "training.steps=1", "training.learning_rate=0.1", lora=lora), tmp_path / "run")
    policy = stretto.open_run(tmp_path / "run").policy(device="cpu")
    tokens = policy.tokenizer("3+3=", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        ours = policy.model(tokens).logits
        base = AutoModelForCausalLM.from_pretrained(model)
        before = base(tokens).logits
        if lora:
            from peft import PeftModel

            base = PeftModel.from_pretrained(base, tmp_path / "run" / "policy")
        else:
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
        theirs = base(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours, before, atol=1e-3)
    greedy = policy.generate("3+3=", temperature=0, max_tokens=3)
    assert greedy == policy.generate("3+3=", temperature=0, max_tokens=3)
    assert policy.tokenizer(greedy, return_tensors="pt")["input_ids"].shape[1] <= 4
    assert policy.generate("3+3=", seed=3) == policy.generate("3+3=", seed=3)
    assert len({policy.generate("3+3=", seed=seed) for seed in range(8)}) > 1
    with pytest.raises(RunError, match="was trained on raw text"):
        policy.generate([{"role": "user", "content": "3+3="}])


def test_runs_are_compared_by_what_differs(finished: Path, model: Path, tmp_path: Path) -> None:
    run(recipe(model, tmp_path, "training.steps=1", "rollout.group=2"), tmp_path / "small")
    table = stretto.compare_runs([finished, stretto.open_run(tmp_path / "small")])
    assert table["run"] == ["run", "small"]
    assert table["outcome"] == ["finished", "finished"]
    assert table["updates"] == [3, 1]
    assert table["rollout.group"] == [4, 2]
    assert table["training.steps"] == [3, 1]
    assert "rollout.prompts" not in table.columns
    summary = stretto.open_run(finished).summary
    assert table[0]["score_before"] == summary["eval_before"]
    assert table[0]["score_after"] == summary["eval_after"]
    assert table[0]["age"] == pytest.approx(summary["staleness"]["mean"])
    assert table[0]["tokens_per_second"] == pytest.approx(summary["tokens_per_second"])
    with pytest.raises(RunError, match="takes a list of runs"):
        stretto.compare_runs(str(finished))  # type: ignore[arg-type]


def test_a_recipe_that_changed_is_compared_with_all_of_its_values(tmp_path: Path) -> None:
    record_extended_run(tmp_path / "a")
    record_run(tmp_path / "b", config=CONFIG.replace("0.001", "0.0005"))
    for name in "ab":
        (tmp_path / name / "metrics.jsonl").touch()
    table = stretto.compare_runs([tmp_path / "a", tmp_path / "b"])
    assert table["training.learning_rate"] == ["0.001, from update 2: 0.0005", 0.0005]
    assert table["training.steps"] == ["2, from update 2: 4", 4]
    assert "seed" not in table.columns


def test_a_killed_run_is_read_up_to_where_it_came(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    import sqlite3

    with sqlite3.connect(folder / "journal.sqlite") as db:
        db.execute("UPDATE sessions SET outcome = NULL, ended_at = NULL")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "update", "upda')
    made = stretto.open_run(folder)
    assert (made.outcome, made.problem) == ("killed", None)
    assert made.summary == {}
    assert len(made.metrics()) == 3
    assert stretto.compare_runs([made])["outcome"] == ["killed"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        stretto.open_run(tmp_path / "none")
    with pytest.raises(RunError, match="is no run folder"):
        stretto.open_run(tmp_path)
