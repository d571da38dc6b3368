"""The files that packaging names exist, and say the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import stretto

ROOT = Path(__file__).parents[1]


def test_the_dockerfile_copies_files_that_exist_and_that_its_ignore_file_lets_through() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]
    assert copied
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in allowed
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (wanted,) = re.findall(r'"/stretto\[(.+)\]"', text)
    assert set(wanted.split(",")) <= extras.keys()


def test_the_changes_begin_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == stretto.__version__


def test_the_package_data_patterns_match_files() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    for pattern in settings["package-data"]["stretto"]:
        assert list((ROOT / "src" / "stretto").glob(pattern)), pattern
