"""Runs trained again from their journals."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_cases import recipe, run

from stretto.assembly.retrain import made_trainer, retrain
from stretto.cli import main
from stretto.errors import RunError
from stretto.setup.device import CUDA, with_section
from stretto.store.reader import JournalReader
from stretto.training.loss_scaling import LossScale

MIXES = {
    "synchronous": ['rollout.paradigm="synchronous"'],
    "multi-version": ["rollout.staleness=2", "rollout.in_flight=6", "rollout.max_tokens=30"],
    "partial": ['rollout.paradigm="partial"', "rollout.in_flight=6", "rollout.max_tokens=30"],
    "steps": ["training.optimizer_steps=3", "training.replay={ratio=0.5}", "rollout.staleness=2"],
}


@pytest.mark.parametrize(
    ("name", "lora"), [("synchronous", True), ("multi-version", True), ("multi-version", False), ("steps", True)]
)
def test_a_run_trained_again_comes_to_the_recorded_weights(
    model: Path, tmp_path: Path, name: str, lora: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recipe(model, tmp_path, *MIXES[name], "training.steps=4", "evaluation.prompts=0", lora=lora)
    run(made, tmp_path / "run")
    assert main(["replay", str(tmp_path / "run"), "--out", str(tmp_path / "again")]) == 0
    said = capsys.readouterr().out.splitlines()
    with JournalReader(tmp_path / "run") as reader:
        assert said[:-1] == [f"version {v} agrees: {checksum}" for v, checksum in reader.versions().items()]
    assert said[-1] == "all 5 versions of 4 updates agree with what was recorded"
    assert contents(tmp_path / "again") == contents(tmp_path / "run" / "policy")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, whatever the folder is called."""
    files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {str(name): path.read_bytes().replace(bytes(folder), b"FOLDER") for name, path in files.items()}


def test_a_policy_trained_again_from_chats_says_how_it_was_asked(model: Path, tmp_path: Path) -> None:
    made = recipe(model, tmp_path, 'task.system="Be brief."', "training.steps=1", "evaluation.prompts=0")
    run(made, tmp_path / "run")
    (tmp_path / "prompts.jsonl").unlink()  # the journal is enough
    retrain(tmp_path / "run", out=tmp_path / "again")
    assert "trained on chats" in (tmp_path / "again" / "README.md").read_text()
    assert contents(tmp_path / "again") == contents(tmp_path / "run" / "policy")


def test_the_device_is_prepared_before_a_model_is_on_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(model, tmp_path)
    calls: list[str] = []
    monkeypatch.setattr("stretto.assembly.retrain.choose_device", lambda wanted: CUDA)
    monkeypatch.setattr("stretto.setup.device.keep_compiled", lambda device: calls.append(f"keep on {device}"))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=100 << 30))
    monkeypatch.setattr(
        "torch.cuda.set_per_process_memory_fraction", lambda share, device: calls.append(f"{share:.3f}")
    )

    def load(*asked: object) -> None:
        raise RunError(f"{calls} before the model")

    monkeypatch.setattr("stretto.assembly.retrain.load_model", load)
    with pytest.raises(RunError, match=r"\['keep on cuda:0', '0\.234'\] before the model"):
        made_trainer(with_section(made, "runtime", device_gib=24.0), lambda text: None)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_run_in_float16_whose_scale_fell_comes_to_the_same_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    monkeypatch.setattr("stretto.training.trainer.initial_loss_scale", lambda dtype: LossScale(2.0**22))
    made = recipe(model, tmp_path, 'model.dtype="float16"', *MIXES["steps"], "evaluation.prompts=0", lora=lora)
    run(made, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss_scale"] < 2.0**22 for line in lines] == [True] * 3
    assert retrain(tmp_path / "run").difference is None
    assert retrain(tmp_path / "run").updates == 3


def test_the_first_version_that_differs_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(recipe(model, tmp_path, 'rollout.paradigm="synchronous"', "evaluation.prompts=0"), tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / "journal.sqlite") as db:
        changed = "SELECT trajectory FROM members WHERE update_id = 1 LIMIT 1"
        db.execute(f"UPDATE trajectories SET reward = reward + 1 WHERE trajectory = ({changed})")
    db.close()
    assert main(["replay", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("version 1 agrees")
    assert said[2].startswith("version 2 differs: recorded ")
    assert len(said) == 3
    assert retrain(tmp_path / "run", until=1).difference is None
    assert retrain(tmp_path / "run", until=1).updates == 1
    with sqlite3.connect(tmp_path / "run" / "journal.sqlite") as db:
        ((id,),) = db.execute(changed).fetchall()
        db.execute("UPDATE completions SET logprobs = x'00' WHERE trajectory = ?", (id,))
    db.close()
    assert main(["replay", str(tmp_path / "run")]) == 2, "what is no difference is no broken promise"
    assert f"JournalError: journal `{tmp_path}/run/journal.sqlite` is damaged" in (said := capsys.readouterr().err)
    assert f"trajectory {id}: " in said


def test_what_cannot_be_trained_again_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no `journal.sqlite`"):
        retrain(tmp_path)
    run(recipe(model, tmp_path, "training.steps=1", "evaluation.prompts=0"), tmp_path / "run")
    with pytest.raises(RunError, match="`--until` is 2; the run has versions 0 to 1"):
        retrain(tmp_path / "run", until=2)
    with pytest.raises(RunError, match="exists already; choose another `--out`"):
        retrain(tmp_path / "run", out=tmp_path)
    with pytest.raises(RunError, match=r"nothing can be written to .*config.toml`; choose another `--out`"):
        retrain(tmp_path / "run", out=tmp_path / "run" / "config.toml" / "policy")
    with pytest.raises(RunError, match=r"it holds runs; give one of them: .*/run`"):
        retrain(tmp_path)
