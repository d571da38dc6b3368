"""The rows of an engine: their places, their state on the device, and the results that arrive for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stretto.engines.native.cache import PAGE
from stretto.engines.native.rows import CONTEXT, FREE, LIVE, MADE, SLOT, TOKEN, Drawn, Pending, Rows
from stretto.engines.native.sequence import SequenceState
from stretto.types import Request, Sampling

CPU = torch.device("cpu")


def trajectory(number: int, prompt: int = 20, tokens: tuple[int, ...] = (), **how: Any) -> SequenceState:
    sampling = Sampling(**{"max_tokens": 50, **how})
    made = SequenceState(Request(number, 0, tuple(range(prompt)), 7 + number, sampling), number, number % 3)
    made.tokens = np.array(tokens, dtype=np.int32)
    made.logprobs = np.zeros(len(tokens), dtype=np.float32)
    count = -(-(prompt + len(tokens)) // PAGE)
    made.pages = [100 * (number + 1) + page for page in range(count)]
    return made


def filled(mixed: bool, count: int = 5) -> tuple[Rows, list[SequenceState]]:
    rows = Rows(8, 64, CPU, mixed=mixed)
    added = [trajectory(number, tokens=(1, 2, 3)[: number % 4]) for number in range(count)]
    rows.append(added)
    rows.upload()
    return rows, added


def drawn(tokens: list[int], logprobs: list[float] | None = None) -> Drawn:
    values = np.zeros(len(tokens)) if logprobs is None else logprobs
    return Drawn(np.array(tokens), np.array(values, dtype=np.float32), None, None)


def state(rows: Rows, row: int) -> tuple[list[int], list[int]]:
    return rows.ints[:, row].tolist(), rows.table[row].tolist()


@pytest.mark.parametrize("mixed", [False, True])
def test_a_row_on_the_device_is_its_trajectory(mixed: bool) -> None:
    rows, added = filled(mixed)
    for each in added:
        ints, table = state(rows, each.row)
        made = len(each.tokens)
        assert (ints[CONTEXT], ints[SLOT], ints[MADE], ints[LIVE]) == (20 + made, each.slot, made, 1)
        assert ints[TOKEN] == (each.tokens[-1] if made else 0)
        slots = [page * PAGE + offset for page in each.pages for offset in range(PAGE)]
        expected = slots if mixed else each.pages
        assert table[: len(expected)] == expected


@pytest.mark.parametrize("mixed", [False, True])
def test_a_granted_page_is_in_the_table_after_the_next_upload(mixed: bool) -> None:
    rows, added = filled(mixed)
    last = added[4]
    rows.context[last.row] = 2 * PAGE + 1
    assert rows.lacking() == [last]
    rows.grant([(last, 77)])
    assert rows.lacking() == []
    rows.upload()
    table = state(rows, last.row)[1]
    assert table[2 * PAGE : 3 * PAGE] == list(range(77 * PAGE, 78 * PAGE)) if mixed else table[2] == 77


@pytest.mark.parametrize("mixed", [False, True])
def test_compaction_moves_the_last_rows_into_the_holes_with_all_that_they_have(mixed: bool) -> None:
    rows, added = filled(mixed)
    rows.record(rows.numbers(), drawn([10, 11, 12, 13, 14]))
    before = {each.request.id: (state(rows, each.row), rows.output(each.row)) for each in added}
    for each in (added[0], added[2]):
        rows.remove(each.row)
        assert each.row == -1
    assert not rows.dense
    rows.compact()
    assert rows.dense
    assert rows.numbers().tolist() == [0, 1, 2]
    for each in (added[1], added[3], added[4]):
        assert rows.at(each.row) is each
        now, (tokens, logprobs) = state(rows, each.row), rows.output(each.row)
        old, (old_tokens, old_logprobs) = before[each.request.id]
        assert now == old
        assert tokens.tolist() == old_tokens.tolist()
        assert logprobs.tolist() == old_logprobs.tolist()


def test_a_row_that_is_free_pads_a_batch_at_the_scratch_page() -> None:
    rows, added = filled(mixed=False)
    rows.remove(added[3].row)
    rows.upload()
    assert state(rows, 3) == (list(FREE), [0] * rows.table.shape[1])


def test_in_mixed_batches_free_rows_pad_once_they_are_cleared() -> None:
    rows, added = filled(mixed=True)
    for each in added[1:]:
        rows.remove(each.row)
    rows.compact()
    rows.clear_from(1)
    for row in range(1, 20):
        ints, table = state(rows, row)
        assert ints == list(FREE)
        assert table[0] == 0, "a padding row writes to the scratch page"
    assert state(rows, 0)[0][LIVE] == 1


def test_a_result_for_a_row_that_holds_another_trajectory_is_dropped() -> None:
    rows, added = filled(mixed=False)
    numbers = rows.numbers()
    serials = rows.launched(numbers)
    outputs = torch.zeros(2, 5, dtype=torch.int32)
    outputs[0] = torch.arange(30, 35)
    rows.remove(added[2].row)
    late = trajectory(9)
    rows.append([late])
    assert late.row == 2
    found, results = rows.current(Pending(numbers, serials, outputs, np.arange(5), None))
    assert found.tolist() == [0, 1, 3, 4]
    assert results.tokens.tolist() == [30, 31, 33, 34]
    rows.record(found, results)
    assert len(rows.output(2)[0]) == 0


@pytest.mark.parametrize("mixed", [False, True])
def test_rows_end_by_stop_token_length_or_failure_and_a_string_may_end_one(mixed: bool) -> None:
    rows = Rows(8, 64, CPU, mixed=mixed)
    rows.append([
        trajectory(0, stop_tokens=(5, 6)),
        trajectory(1, max_tokens=1),
        trajectory(2),
        trajectory(3, stop_strings=("x",)),
        trajectory(4),
    ])  # fmt: skip
    endings = rows.record(rows.numbers(), drawn([6, 1, 6, 1, 1], [-1.0, -1.0, -1.0, -1.0, float("nan")]))
    assert endings == [(0, "stop", False), (1, "length", False), (3, None, False), (4, "length", True)]


@pytest.mark.parametrize("mixed", [False, True])
def test_outputs_grow_and_are_saved_with_the_trajectory(mixed: bool) -> None:
    rows = Rows(2, 512, CPU, mixed=mixed)
    own = trajectory(0, max_tokens=500)
    rows.append([own])
    for number in range(200):
        assert rows.record(rows.numbers(), drawn([number], [-float(number)])) == []
    rows.save(own)
    assert own.tokens.tolist() == list(range(200))
    assert own.logprobs.tolist() == [-float(number) for number in range(200)]


def test_the_kinds_of_draws_are_known_for_the_rows_in_use() -> None:
    rows = Rows(4, 64, CPU, mixed=True)
    plain, greedy, cut = trajectory(0), trajectory(1, temperature=0.0), trajectory(2, top_k=3)
    rows.append([plain])
    rows.numbers()
    assert (rows.any_greedy, rows.any_scaled, rows.any_truncates) == (False, False, False)
    rows.append([greedy, cut])
    rows.numbers()
    assert (rows.any_greedy, rows.any_scaled, rows.any_truncates) == (True, True, True)
    rows.remove(greedy.row)
    rows.numbers()
    assert (rows.any_greedy, rows.any_scaled, rows.any_truncates) == (False, False, True)
