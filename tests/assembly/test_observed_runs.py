"""What a run records for people who look at it, and `stretto view` of a real run."""

from __future__ import annotations

from pathlib import Path

from run_cases import assert_verifies, recipe, rows, run

from stretto.view.api import Api
from stretto.view.runs import RunSource


def test_a_run_keeps_values_of_tokens_answers_and_its_status_and_the_page_reads_them(
    model: Path, task: None, tmp_path: Path
) -> None:
    made = recipe(model, tmp_path, "observe.tokens=true", "rollout.staleness=1")
    run(made, tmp_path / "run")
    assert_verifies(tmp_path / "run")
    recorded = rows(
        tmp_path / "run",
        "SELECT v.update_id, length(v.logprobs), length(v.gradients), 4 * c.num_sampled FROM token_values v "
        "JOIN members m USING (update_id, position) JOIN completions c USING (trajectory, lineage)",
    )
    assert recorded
    assert {update for update, *_ in recorded} == {0, 1, 2}
    assert all(logprobs == gradients == expected for _, logprobs, gradients, expected in recorded)
    assert rows(tmp_path / "run", "SELECT COUNT(*), COUNT(DISTINCT evaluation) FROM answers") == [(4, 2)]

    api = Api([RunSource(tmp_path / "run")])
    state = api.answer("state", {})
    assert (state["condition"], state["updates_done"]) == ("finished", 3)
    assert state["status"]["num_instances"] == 1
    (trained,) = rows(
        tmp_path / "run", "SELECT trajectory FROM members JOIN token_values USING (update_id, position) LIMIT 1"
    )
    lineage = api.answer("trajectory", {"id": str(trained[0])})["lineages"][0]
    assert all(value is not None for value in lineage["values"]["ratios"])
    assert lineage["pieces"] is not None, "the tokenizer of the policy is found"
    same = [value for value in lineage["values"]["logprobs"] if value is not None]
    assert len(same) == len(lineage["logprobs"])
    assert api.answer("answers", {"evaluation": "1"})["matching"] == 2


def test_without_the_option_no_value_of_a_token_is_kept(model: Path, task: None, tmp_path: Path) -> None:
    run(recipe(model, tmp_path, "training.steps=1", "evaluation.prompts=0"), tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT COUNT(*) FROM token_values") == [(0,)]
    assert rows(tmp_path / "run", "SELECT COUNT(*) FROM answers") == [(0,)]
