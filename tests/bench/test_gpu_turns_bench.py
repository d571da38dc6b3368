"""The bench of conversations, on the CPU with a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benches are no part of the package

from bench.gpu import turns
from bench.gpu.cells import read_cells
from stretto.engines.native import host_kv

torch.set_num_threads(1)


def test_conversations_prefill_a_token_once_if_their_kv_is_retained(tmp_path: Path) -> None:
    usual = host_kv.USED_ON_GPUS
    turns.main(["--tiny", "--device", "cpu", "--ways", "retained,again", "--out", str(tmp_path)])
    cells = {cell["parameters"]["way"]: cell["results"] for cell in read_cells([tmp_path])}
    new, sampled, episodes, num_turns = 192 // 3 - 16, 16, 4, 3
    contexts = [turn * new + (turn - 1) * sampled for turn in range(1, num_turns + 1)]
    assert cells["again"]["prefilled"] == episodes * sum(contexts)
    least = episodes * num_turns * new
    assert least <= cells["retained"]["prefilled"] <= least + episodes * (num_turns - 1) * 16, "a page each, at most"
    assert host_kv.USED_ON_GPUS is usual


def test_a_way_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        turns.main(["--tiny", "--device", "cpu", "--ways", "retained,none", "--out", str(tmp_path)])
