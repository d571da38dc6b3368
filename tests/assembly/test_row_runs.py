"""Whole runs over data as people have it: several files, other columns, long prompts, a chosen chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from run_cases import assert_verifies, equal, policy, recipe, rows, run
from transformers import AutoTokenizer

import stretto
from stretto.assembly.policy_export import export
from stretto.assembly.retrain import retrain
from stretto.assembly.serve import PolicyFolder
from stretto.errors import RecipeError, RunError
from stretto.models.loading import load_tokenizer
from stretto.observe.progress import Silent
from stretto.recipe.schema import Recipe

LONG = {4, 11}  # rows whose prompts are too long
LIMIT = "rollout.kv_tokens=256"  # with prompts of up to 244 tokens


def write_files() -> None:
    """Two files of rows with columns of their own, some of which are too long."""
    for name, numbers in (("a", range(8)), ("b", range(8, 16))):
        records = [
            {"question": f"{number}+{number}=" + "x" * (400 if number in LONG else 0), "solution": number}
            for number in numbers
        ]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def of_files(model: Path, folder: Path, *overrides: str) -> Recipe:
    return recipe(
        model,
        folder,
        'task.path=["a.jsonl", "b.jsonl"]',
        'task.columns={prompt = "question", answer = "solution"}',
        "evaluation.prompts=0",
        "rollout.paradigm=synchronous",
        LIMIT,
        *overrides,
    )


class Listens(Silent):
    def __init__(self) -> None:
        self.said = list[str]()

    def message(self, text: str) -> None:
        self.said.append(text)


class Dies(Listens):
    def updated(self, line: Mapping[str, Any]) -> None:
        if line["update"] == 1:
            raise KeyError("as if it were killed here")


@pytest.mark.parametrize("order", ["shuffled", "pass-rate"])
def test_rows_that_are_dropped_are_told_of_and_stay_dropped_when_a_run_is_resumed(
    model: Path, tmp_path: Path, order: str
) -> None:
    write_files()
    asked = of_files(model, tmp_path, 'task.too_long="drop"', "training.steps=6", f"task.order={order}")
    run(asked, tmp_path / "whole")
    killed = Dies()
    with pytest.raises(KeyError):
        run(asked, tmp_path / "killed", observer=killed)
    (note,) = (text for text in killed.said if "left out" in text)
    assert note.startswith("2 prompts of `a.jsonl` and 1 more have more than 244 tokens and are left out")
    assert "a.jsonl:5 (404 tokens), b.jsonl:4 (406 tokens); the longest has 406" in note
    more_room = of_files(
        model, tmp_path, 'task.too_long="drop"', "training.steps=6", "rollout.kv_tokens=1024", f"task.order={order}"
    )
    run(more_room, tmp_path / "killed", resume=True)
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        drawn = [number for (number,) in rows(folder, "SELECT row_number FROM groups ORDER BY group_id")]
        assert not LONG & set(drawn)
        assert max(drawn) == 15, "numbers are those of all rows"
        if order == "shuffled":
            assert set(drawn) == set(range(16)) - LONG
        assert_verifies(folder)
    assert equal(policy(tmp_path / "whole"), policy(tmp_path / "killed"))


def test_a_resumed_run_with_less_room_than_its_prompts_need_is_refused(model: Path, tmp_path: Path) -> None:
    write_files()
    with pytest.raises(KeyError):
        run(of_files(model, tmp_path, 'task.too_long="truncate"'), tmp_path / "run", observer=Dies())
    less = of_files(model, tmp_path, 'task.too_long="truncate"', "rollout.kv_tokens=128")
    with pytest.raises(RecipeError, match=r"began with prompts of up to 244 tokens, and .* leave room for 116 now"):
        run(less, tmp_path / "run", resume=True)
    run(of_files(model, tmp_path, 'task.too_long="truncate"'), tmp_path / "run", resume=True)
    assert_verifies(tmp_path / "run")


def test_prompts_that_are_too_long_are_refused_unless_something_is_said(model: Path, tmp_path: Path) -> None:
    write_files()
    with pytest.raises(
        RecipeError, match=r'2 prompts have more tokens .* set `task.too_long = "drop"` or `task.too_long = "truncate"`'
    ):
        run(of_files(model, tmp_path), tmp_path / "run")


def test_changed_data_is_noticed_when_a_run_is_resumed(model: Path, tmp_path: Path) -> None:
    write_files()
    Path("held.jsonl").write_text('{"question": "2+2=", "solution": 4}\n' * 3)
    held_out = 'task.evaluation_path="held.jsonl"'
    asked = of_files(model, tmp_path, 'task.too_long="drop"', held_out, "evaluation.prompts=2")
    with pytest.raises(KeyError):
        run(asked, tmp_path / "run", observer=Dies())
    original = Path("b.jsonl").read_text()
    Path("b.jsonl").write_text(original.replace("15+15", "15+16"))
    with pytest.raises(
        RunError, match=r"the data is not what the run in .* began with:\n  `b.jsonl` has changed since"
    ):
        run(asked, tmp_path / "run", resume=True)
    Path("b.jsonl").write_text(original)
    Path("held.jsonl").write_text('{"question": "1+1=", "solution": 2}\n' * 3)
    listens = Listens()
    run(asked, tmp_path / "run", resume=True, observer=listens)
    assert any("the rows to evaluate on have changed" in text and "`held.jsonl`" in text for text in listens.said)
    assert_verifies(tmp_path / "run")


def test_a_pattern_that_matches_another_file_when_a_run_is_resumed_is_refused(model: Path, tmp_path: Path) -> None:
    Path("data").mkdir()
    Path("data/a.jsonl").write_text(Path("prompts.jsonl").read_text())
    asked = recipe(model, tmp_path, 'task.path="data/*.jsonl"', "evaluation.prompts=0")
    with pytest.raises(KeyError):
        run(asked, tmp_path / "run", observer=Dies())
    Path("data/b.jsonl").write_text('{"prompt": "x", "answer": 1}\n')
    with pytest.raises(RunError, match=r"`data/b\.jsonl` is new"):
        run(asked, tmp_path / "run", resume=True)
    Path("data/b.jsonl").unlink()
    run(asked, tmp_path / "run", resume=True)


# -- the chat template -------------------------------------------------------------------------------------------------

TEMPLATE = "{% for message in messages %}[{{ message.role }}{{ '!' if loud }}] {{ message.content }}\n{% endfor %}"
ASK = "[user!] 3+3=\n<"


@pytest.mark.parametrize("lora", [True, False])
def test_the_policy_carries_the_template_of_its_training(model: Path, tmp_path: Path, lora: bool) -> None:
    Path("mine.jinja").write_text(TEMPLATE)
    asked = recipe(
        model,
        tmp_path,
        'task.chat_template="mine.jinja"',
        "task.template={loud = true}",
        'task.prefill="<"',
        'task.columns={messages = "prompt"}',
        "training.steps=2",
        lora=lora,
    )
    killed = tmp_path / "killed"
    with pytest.raises(KeyError):
        run(asked, killed, observer=Dies())
    Path("mine.jinja").write_text(TEMPLATE + "changed")
    with pytest.raises(RunError, match=r"`task.chat_template = 'mine.jinja'` is not what it was when the run in"):
        run(asked, killed, resume=True)
    export(killed, tmp_path / "exported")
    retrain(killed, out=tmp_path / "again")
    Path("mine.jinja").write_text(TEMPLATE)
    run(asked, killed, resume=True)
    Path("mine.jinja").unlink()
    ((text,), *_) = rows(killed, "SELECT prompt_text FROM groups WHERE row_number = 3")
    assert text == ASK
    chat = [{"role": "user", "content": "3+3="}]
    trained = stretto.open_run(killed).policy(device="cpu")
    assert trained._prompt("3+3=") == (ASK, False)
    for tokenizer in (
        trained.tokenizer,
        load_tokenizer(PolicyFolder.find(killed).tokenizer),
        *(
            AutoTokenizer.from_pretrained(folder)
            for folder in (killed / "policy", tmp_path / "exported", tmp_path / "again")
        ),
    ):
        assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == ASK
    if lora:
        export(killed, tmp_path / "merged", merge=True)
        merged = AutoTokenizer.from_pretrained(tmp_path / "merged")
        assert merged.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == ASK
    assert "apply_chat_template" in (killed / "policy" / "README.md").read_text()


def test_a_changed_template_of_the_model_is_noticed_when_a_run_is_resumed(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "model"
    shutil.copytree(model, own)
    template = own / "chat_template.jinja"
    template.write_text(TEMPLATE)
    asked = recipe(own, tmp_path, 'task.columns={messages = "prompt"}', "training.steps=2", "evaluation.prompts=0")
    with pytest.raises(KeyError):
        run(asked, tmp_path / "run", observer=Dies())
    template.write_text(TEMPLATE + "changed")
    with pytest.raises(RunError, match=r"^the chat template of `model\.path` is not what it was when the run in"):
        run(asked, tmp_path / "run", resume=True)
    template.write_text(TEMPLATE)
    run(asked, tmp_path / "run", resume=True)
