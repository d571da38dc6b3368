"""What this machine can do, and what is said of one that can do less."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stretto.assembly import doctor
from stretto.assembly.doctor import EXTRAS, REQUIRED, Finding, examine, exit_status, lines_of
from stretto.cli import main

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_a_machine_that_runs_these_tests_has_nothing_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert not report["broken"]
    parts = list(dict.fromkeys(finding["part"] for finding in report["findings"]))
    assert parts == ["versions", "device", "kernels", "disk", "sandbox", "limits", "extras"]
    found = {(finding["part"], finding["name"]): finding for finding in report["findings"]}
    assert found["versions", "torch"]["status"] == "ok"
    assert "free" in found["disk", "working directory"]["value"]
    assert found["extras", "tensorboard"]["status"] == "ok"


def test_the_tables_are_those_of_the_package() -> None:
    needs = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", each).groups() for each in PROJECT["dependencies"])  # type: ignore[union-attr]
    assert needs == REQUIRED
    assert EXTRAS.keys() == PROJECT["optional-dependencies"].keys() - {"test", "browser", "docs"}, (
        "these serve our tests and pages"
    )


def test_what_is_required_and_missing_or_old_is_broken_and_an_extra_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REQUIRED", {"torch": "99.0", "no-such-package": "1.0", "numpy": "1.26"})
    monkeypatch.setattr(doctor, "EXTRAS", {"wings": ("no_such_module", "to fly")})
    findings = examine()
    found = {finding.name: finding for finding in findings}
    assert exit_status(findings) == 1
    assert (found["torch"].status, found["numpy"].status) == ("broken", "ok")
    assert found["torch"].hint == "needs 99.0 or newer: `pip install 'torch>=99.0'`"
    assert (found["no-such-package"].value, found["no-such-package"].status) == ("not installed", "broken")
    assert (found["wings"].status, found["wings"].hint) == ("missing", "to fly")
    assert exit_status([found["wings"], found["numpy"]]) == 0
    lines = list(lines_of(findings))
    assert any("BROKEN: not installed" in line for line in lines)
    assert any("MISSING: `pip install 'stretto[wings]'`  (to fly)" in line for line in lines)


@pytest.mark.parametrize(("release", "status"), [("0.25.1", "missing"), ("0.32.0", "ok"), (None, "missing")])
def test_a_release_of_vllm_that_no_run_accepts_is_not_called_installed(
    release: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "no_such_module" if release is None else "json"
    monkeypatch.setattr(doctor, "EXTRAS", {"vllm": (module, "engines of vLLM")})
    monkeypatch.setattr(doctor, "installed_release", lambda: release)
    found = next(finding for finding in examine() if finding.name == "vllm")
    assert found.status == status
    assert ("refuses vLLM 0.25.1" in found.value) == (release == "0.25.1")
    assert (found.value == "installed 0.32.0") == (release == "0.32.0")


def test_lines_have_no_control_characters() -> None:
    assert list(lines_of([Finding("disk", "folder", "\x1b[31m")])) == ["disk", "  folder  \\x1b[31m"]


def test_an_installation_without_torch_is_told_and_not_a_traceback() -> None:
    code = (
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'numpy', 'pydantic', 'rich', 'transformers'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Without())\n"
        "from stretto.cli import main\n"
        "sys.exit(main(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "BROKEN" in done.stdout
    assert "cannot be imported: torch" in done.stdout
    assert "limits" in done.stdout, "the other parts are examined all the same"
