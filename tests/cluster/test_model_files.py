"""A model on every machine: used where it lies, sent where it does not, refused where it differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ray_cases import small_cluster

import stretto.cluster.model_files as module
from stretto.cluster.model_files import ModelSource
from stretto.errors import ModelError


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with small_cluster():
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path / "there"))
    (tmp_path / "there").mkdir()
    made = tmp_path / "model"
    (made / "part").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "part" / "weights").write_bytes(b"abc" * 1000)
    return made


def test_a_folder_that_is_here_is_used_as_it_is(folder: Path) -> None:
    assert ModelSource.of(str(folder)).here() == str(folder.resolve())


def test_a_small_folder_is_sent_to_a_machine_that_has_none_or_another(folder: Path) -> None:
    source = ModelSource.of(str(folder))
    (folder / "part" / "weights").write_bytes(b"abd" * 1000)
    found = Path(source.here())
    assert found != folder
    assert (found / "part" / "weights").read_bytes() == b"abc" * 1000
    assert source.here() == str(found), "once is enough"
    assert Path(replace(source, path="/nowhere").here()) == found


def test_a_large_folder_has_to_be_there_with_the_same_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SENT_BYTES", 100)
    source = ModelSource.of(str(folder))
    assert source.files is None
    assert source.here() == str(folder.resolve())
    (folder / "config.json").write_text("{ }")
    with pytest.raises(ModelError, match=r"`model.path = .*` has other files on the machine"):
        source.here()
    with pytest.raises(ModelError, match=r"`model.path = '/nowhere'` is not there on the machine"):
        replace(source, path="/nowhere").here()


def test_a_hub_name_is_refused_where_it_stands_for_another_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cached(cache: Path, revision: str) -> None:
        for name, text in ((f"snapshots/{revision}/config.json", "{}"), ("refs/main", revision)):
            file = cache / "models--someone--something" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached(tmp_path / "driver", "a" * 40)
    source = ModelSource.of("someone/something")
    assert source.here() == "someone/something"
    cached(tmp_path / "other", "b" * 40)
    with pytest.raises(ModelError, match=f"revision {'b' * 40} on the machine .* and {'a' * 40}"):
        source.here()
