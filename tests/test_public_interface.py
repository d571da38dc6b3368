"""The public interface: small, typed, and cheap to import."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import tomli_w

import stretto
from stretto.store.verify import Finding

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
HEAVY = ("torch", "transformers", "numpy", "pydantic", "rich")


def test_importing_it_imports_nothing_heavy_and_offers_every_name() -> None:
    code = (
        "import sys, stretto\n"
        f"heavy = {set(HEAVY)!r} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert set(stretto.__all__) <= set(dir(stretto))\n"
        "assert stretto.load_recipe and stretto.Callback and stretto.train and stretto.open_run\n"
        "assert 'torch' not in sys.modules\n"
        "assert all(callable(getattr(stretto, name)) for name in stretto.__all__ if name[0] != '_')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute `trian`"):
        getattr(stretto, "trian")  # noqa: B009


def test_a_recipe_is_loaded_checked_trained_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "recipe.toml"
    values = {
        "model": {"path": "tiny", "lora": {"rank": 4}, "warm_start": {"steps": 2}},
        "task": {"type": "countdown-chain"},
        "rollout": {"prompts": 2, "group": 2, "max_tokens": 8},
        "training": {"steps": 2},
        "evaluation": {"prompts": 0},
        "runtime": {"engine_threads": 1, "trainer_threads": 1},
    }
    path.write_text(tomli_w.dumps(values))
    recipe = stretto.load_recipe(str(path), ["training.steps=1"])
    assert "steps = 1" in str(stretto.check(recipe))
    run = stretto.train(recipe, out=str(tmp_path / "run"), progress=False)
    assert run.summary["steps"] == 1
    assert run.summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    findings: Sequence[Finding] = stretto.verify(tmp_path / "run")
    assert all(finding.holds for finding in findings)
    with pytest.raises(stretto.StrettoError, match="is finished"):
        stretto.train(recipe, out=tmp_path / "run", resume=True)
    with pytest.raises(stretto.StrettoError, match="names `sideways`"):
        stretto.compare(path, folder=tmp_path / "compared", paradigms=["sideways"])


def test_the_version_number_stands_in_the_package_alone() -> None:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "stretto.__version__"}
