"""The bench of shared prompts, tried on a CPU."""

import json
from pathlib import Path

import pytest

from bench.gpu import shared_prompts


def test_both_sides_train_the_same_batch_and_sharing_computes_fewer_tokens(tmp_path: Path) -> None:
    assert shared_prompts.main(["--tiny", "--out", str(tmp_path)]) == 0
    cells = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sorted(cell["parameters"]["prompt"] for cell in cells) == [0, 40]
    for cell in cells:
        results = cell["results"]
        assert results["tokens"]["shared"] < results["tokens"]["repeated"]
        assert results["speedup"] == results["repeated_s"] / results["shared_s"]
        assert results["grad_norm_difference"] == pytest.approx(0.0, abs=0.05)
        assert results["logprob_difference"] < 0.1
