"""The policy of a run in a folder of its own: copied, merged into its base, of a run that was stopped, uploaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import TOKEN, served_hub
from interruption_cases import Dies
from peft import PeftModel
from run_cases import equal, recipe, rows, run
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stretto.assembly.policy_export import export
from stretto.cli import main
from stretto.errors import RunError
from stretto.models.checksums import checksum

PROMPT = torch.arange(2, 20)[None]


@pytest.fixture
def finished(model: Path, tmp_path: Path) -> Path:
    run(recipe(model, tmp_path, "evaluation.prompts=0", "training.learning_rate=0.05"), tmp_path / "run")
    return tmp_path / "run"


def test_a_merged_policy_is_a_model_with_the_logits_of_the_adapter(
    finished: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models" / "merged"
    assert main(["export", str(finished), "--merge", "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert f"the policy is in {out}" in said.out
    assert f"merging the adapter in {finished / 'policy'} with its base {model}; both stay as they are" in said.out
    assert "Loading" not in said.err, "no bars of transformers"
    base: Any = AutoModelForCausalLM.from_pretrained(model)
    plain = base(PROMPT).logits
    adapted: Any = PeftModel.from_pretrained(base, str(finished / "policy"))
    merged: Any = AutoModelForCausalLM.from_pretrained(out)
    assert merged.dtype == base.dtype
    assert torch.allclose(merged(PROMPT).logits, adapted(PROMPT).logits, atol=1e-4)
    assert not torch.allclose(merged(PROMPT).logits, plain, atol=1e-2)
    assert (
        AutoTokenizer.from_pretrained(out)("12")["input_ids"] == AutoTokenizer.from_pretrained(model)("12")["input_ids"]
    )
    text = (out / "README.md").read_text()
    assert f'AutoModelForCausalLM.from_pretrained("{out}")' in text
    assert "peft" not in text
    assert [path.name for path in out.parent.iterdir()] == ["merged"], "nothing else is left behind"


def test_a_copied_policy_is_the_one_of_the_run(finished: Path, tmp_path: Path) -> None:
    export(finished, tmp_path / "copy")
    name = "adapter_model.safetensors"
    assert (tmp_path / "copy" / name).read_bytes() == (finished / "policy" / name).read_bytes()
    assert f'"{tmp_path / "copy"}")' in (tmp_path / "copy" / "README.md").read_text()


@pytest.mark.parametrize("lora", [True, False])
def test_the_newest_version_of_a_run_that_was_killed_is_exported(model: Path, tmp_path: Path, lora: bool) -> None:
    folder, said = tmp_path / "run", list[str]()
    with pytest.raises(KeyError):
        run(recipe(model, tmp_path, "evaluation.prompts=0", lora=lora), folder, observer=Dies(at=1))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    export(folder, tmp_path / "out", say=said.append)
    assert "version 2, its newest, is exported" in said[0]
    ((recorded,),) = rows(folder, "SELECT checksum FROM updates WHERE update_id = 1")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = {name.removeprefix("base_model.model.").removesuffix(".weight" if lora else ""): tensor
               for name, tensor in load_file(file).items()}  # fmt: skip
    if lora:
        assert checksum(tensors, 2.0) == recorded
    else:
        merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert checksum(dict(merged.named_parameters())) == recorded
    changed = {path for path, data in before.items() if path.read_bytes() != data}
    assert not {path for path in changed if "journal" not in path.name}


def test_what_cannot_be_exported_is_refused_by_name_and_leaves_nothing(
    model: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    entries = set(tmp_path.iterdir())
    with pytest.raises(RunError, match="exists already; choose another `-o`"):
        export(finished, tmp_path)
    with pytest.raises(RunError, match="needs `-o FOLDER`, or `--push NAME`"):
        export(finished, None)
    with pytest.raises(RunError, match="`--push a/b/c` is no name of the hub"):
        export(finished, None, push="a/b/c")
    with pytest.raises(RunError, match="`--push me/policy` needs a login: run `hf auth login`"):
        export(finished, tmp_path / "out", push="me/policy")
    with pytest.raises(RunError, match=r"`--merge` has no effect: the policy of .* is a whole model already"):
        export(model, tmp_path / "out", merge=True)
    with pytest.raises(RunError, match=r"`.*nowhere` does not exist; give the folder that `stretto train` made"):
        export(tmp_path / "nowhere", tmp_path / "out")
    assert main(["export", str(finished), "-o", "out", "--public"]) == 2
    assert set(tmp_path.iterdir()) == entries


def test_a_policy_is_uploaded_by_the_client_of_the_hub(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "stretto", "export", str(finished), "--merge", "--push", "me/policy"]
    with served_hub() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        environment |= {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert f"uploaded to {hub.url}/me/policy/commit/1" in done.stdout
        assert hub.made.get("private", hub.made.get("visibility")) in (True, "private"), hub.made
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= hub.files.keys()
        assert 'from_pretrained("me/policy")' in hub.files["README.md"].decode()
        assert json.loads(hub.files["config.json"])["architectures"]
        export(finished, tmp_path / "merged", merge=True)
        assert equal(load(hub.files["model.safetensors"]), load_file(tmp_path / "merged" / "model.safetensors"))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_" + "b" * 34)
        with pytest.raises(
            RunError, match=r"(?s)`--push me/policy` was refused by the hub: .*log in with `hf auth login`"
        ):
            export(finished, None, push="me/policy")
