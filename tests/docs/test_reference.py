"""What is generated from the code says what the code says: `make reference` brings it up to date."""

from __future__ import annotations

import inspect
import re

import pytest
from doc_pages import ROOT

from docs.tools import pictures, sizing
from docs.tools.drawing import DARK, LIGHT
from docs.tools.reference import GENERATED, between_marks, with_generated_parts
from stretto.cli import main
from stretto.observe.symptoms import KINDS

DOCS = ROOT / "docs"
QUICK = [name for name in GENERATED if name != "docs/howto/gpu.md"]


@pytest.mark.parametrize("name", QUICK)
def test_the_generated_parts_of_a_page_are_up_to_date(name: str) -> None:
    assert with_generated_parts(name) == (ROOT / name).read_text(encoding="utf-8"), "run `make reference`"


def test_the_table_of_sizes_is_up_to_date_for_its_smallest_model(monkeypatch: pytest.MonkeyPatch) -> None:
    name, config = next(iter(sizing.MODELS.items()))
    monkeypatch.setattr(sizing, "MODELS", {name: config})
    assert sizing.sizing_table() in (DOCS / "howto" / "gpu.md").read_text(encoding="utf-8"), "run `make reference`"


def test_the_table_of_recipes_on_cards_is_up_to_date() -> None:
    assert sizing.recipes_table() in (DOCS / "howto" / "gpu.md").read_text(encoding="utf-8"), "run `make reference`"


def test_the_least_memory_of_a_recipe_is_named_in_its_file() -> None:
    table = (DOCS / "howto" / "gpu.md").read_text(encoding="utf-8")
    for path in sizing.RECIPES:
        least = re.search(rf"\| `{re.escape(path)}` \([\w.]+\) \| ([\d.]+) GiB \| ([\d.]+) GiB \|", table)
        assert least is not None
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"Needs a GPU of {least[1]} GiB, or of {least[2]} GiB with `training.checkpointing = true`" in text
        planned = sizing.PlannedRecipe(path)
        assert planned.on(float(least[1])) is not None
        assert planned.on(float(least[1]) - sizing.STEP) is None


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_the_one_that_is_drawn_now(name: str, palette: pictures.Palette) -> None:
    committed = ROOT / "docs" / "images" / f"{name}{palette.suffix}.svg"
    assert pictures.PICTURES[name](palette).svg() == committed.read_text(encoding="utf-8"), "run `make reference`"


def test_the_groups_of_the_picture_of_seats_have_seats_in_time() -> None:
    """The picture of admission is drawn by hand: its groups have to keep the invariant."""
    from stretto.core.admission import invariant_holds, room

    outstanding = {version + 2: count for version, count in pictures.SEATED.items()}
    assert invariant_holds(outstanding, 7, 4)
    assert room(outstanding, 9, 7, 4) == 2


def test_the_page_about_exit_codes_has_those_of_the_command_line() -> None:
    text = (DOCS / "reference" / "exit-codes.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    assert listed == re.findall(r"(\d+): ", inspect.getdoc(main) or "")


def test_the_page_about_runs_that_do_not_learn_has_every_warning() -> None:
    text = (DOCS / "howto" / "debugging.md").read_text(encoding="utf-8")
    missing = [kind for kind in (*KINDS, "effective-sample-size", "entropy", "mismatch") if f"| `{kind}` |" not in text]
    assert not missing


def test_only_what_stands_between_the_marks_is_written() -> None:
    text = "before\n<!-- keys: begin -->\nold\n<!-- keys: end -->\nafter\n"
    made = between_marks(text, "keys", "new\n")
    assert made == "before\n<!-- keys: begin -->\n\nnew\n\n<!-- keys: end -->\nafter\n"
    assert between_marks(made, "keys", "new\n") == made


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no marks"):
        between_marks("text", "keys", "part")
