"""Rewards that raise, hang, die and lie: each fails alone."""

import asyncio
import contextlib
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.environments import reward_pool
from stretto.environments.reward_environment import PASSED, named_variables
from stretto.environments.reward_output import MAX_SHOWN, RewardOutput
from stretto.environments.reward_pipes import (
    LENGTH,
    MAX_REASON,
    BrokenFrameError,
    Greeting,
    max_frame_bytes,
    read_results,
    read_reward_greeting,
    results_frame,
    reward_greeting_frame,
)
from stretto.environments.reward_pool import RewardPool
from stretto.errors import LateRewardError, RecipeError, RewardError, ScoringHaltedError

FOLDER = str(Path(__file__).parents[1] / "cases")


@pytest.fixture(autouse=True)
def _functions(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


@asynccontextmanager
async def pool(function, **options):
    it = RewardPool(f"reward_functions:{function}", **options)
    await it.start()
    try:
        yield it
    finally:
        await it.close()


async def score_all(it, completions, row=None):
    calls = (it.score("p", completion, row or {}) for completion in completions)
    return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_reward_is_given_the_completion_and_the_row():
    async def run():
        async with pool("length") as it:
            assert await it.score("p", "four", {"bonus": 2, "other": None}) == 6.0
            assert await score_all(it, ["a" * n for n in range(300)]) == list(range(300))

    asyncio.run(run())


def test_a_function_without_row_is_given_the_columns_that_it_names():
    async def run():
        async with pool("only_answer") as it:
            assert await it.score("p", "7", {"answer": "7", "other": 1}) == 1.0
            with pytest.raises(RewardError, match="missing 1 required positional argument: 'answer'"):
                await it.score("p", "7", {"other": 1})

    asyncio.run(run())


def test_each_kind_of_bad_reward_fails_alone_and_says_what_it_got():
    expected = {
        "raise": r"`reward_functions:as_asked` raised KeyError: 'no such answer' \(reward_functions.py:\d+\)",
        "exit": "raised SystemExit: 3",
        "nan": r"returned nan \(float\); a reward is a finite number",
        "inf": r"returned inf \(float\)",
        "none": r"returned None \(NoneType\)",
        "string": r"returned '1.0' \(str\)",
    }

    async def run():
        async with pool("as_asked") as it:
            results = await score_all(it, [*expected, "true", "print", "fine"])
            assert it.replaced == 0
        return results

    *failures, true, printed, fine = asyncio.run(run())
    assert (true, printed, fine) == (1.0, 1.0, 1.0)
    for failure, pattern in zip(failures, expected.values(), strict=True):
        with pytest.raises(RewardError, match=pattern):
            raise failure


@pytest.mark.parametrize("function", ["large", "large_later"])
def test_a_reward_that_cannot_be_trained_on_fails_alone_and_is_told_the_bound(function):
    async def run():
        async with pool(function) as it:
            results = await score_all(it, ["1e9", "-1e9", "1e101", "-1.0000001e9", "10**400", "1e39", "2"])
            assert it.replaced == 0
        return results

    highest, lowest, *failures, fine = asyncio.run(run())
    assert (highest, lowest, fine) == (1e9, -1e9, 2.0)
    beyond = r"beyond 1e\+09, the largest reward that can be trained on: scale the rewards"
    expected = [rf"returned 1e\+101 \(float\), {beyond}", rf"returned -1000000100.0 \(float\), {beyond}"]
    expected += ["raised OverflowError", rf"returned 1e\+39 \(float\), {beyond}"]
    for failure, pattern in zip(failures, expected, strict=True):
        with pytest.raises(RewardError, match=pattern):
            raise failure


def test_a_hung_reward_fails_alone_and_its_worker_is_replaced():
    async def run():
        async with pool("as_asked", deadline_s=0.3) as it:
            first = await it.score("p", "pid", {})
            results = await score_all(it, ["ok", "hang", "ok", "raise", "hang", "ok"])
            second = await it.score("p", "pid", {})
            assert it.replaced == 2
        return first, second, results

    first, second, results = asyncio.run(run())
    assert first != second
    assert not is_alive(int(first))
    assert not is_alive(int(second))
    assert [results[i] for i in (0, 2, 5)] == [1.0, 1.0, 1.0]
    for i in (1, 4):
        with pytest.raises(LateRewardError, match=r"did not return within `task.reward_seconds = 0.3`"):
            raise results[i]
    with pytest.raises(RewardError, match="KeyError"):
        raise results[3]


def test_results_do_not_wait_for_a_hung_neighbour_in_their_batch():
    async def run():
        async with pool("as_asked", deadline_s=30) as it:
            calls = [asyncio.create_task(it.score("p", c, {}), name=c) for c in ("ok", "ok", "hang")]
            done, _ = await asyncio.wait(calls[:2], timeout=5)
            assert [call.result() for call in done] == [1.0, 1.0]
            await it.close()
            with pytest.raises(RewardError, match="was stopped before it returned"):
                await calls[2]

    asyncio.run(run())


def test_a_worker_that_dies_fails_the_item_that_it_was_on():
    async def run():
        async with pool("as_asked") as it:
            results = await score_all(it, ["ok", "die", "ok", "die", "ok"])
            assert it.replaced == 2
        return results

    results = asyncio.run(run())
    assert [results[i] for i in (0, 2, 4)] == [1.0] * 3
    for i in (1, 3):
        with pytest.raises(RewardError, match="ended its process with exit code 7 while it scored this completion"):
            raise results[i]


def test_a_worker_that_is_killed_while_idle_is_replaced():
    async def run():
        async with pool("as_asked") as it:
            os.kill(int(await it.score("p", "pid", {})), signal.SIGKILL)
            assert await score_all(it, ["ok"] * 5) == [1.0] * 5

    asyncio.run(run())


def test_workers_share_slow_rewards():
    async def run():
        async with pool("slow", workers=2) as it:
            await score_all(it, ["x"] * 4)  # it has to see once that they are slow
            return set(await score_all(it, ["x"] * 20))

    assert len(asyncio.run(run())) == 2


def test_async_rewards_run_at_once():
    async def run():
        async with pool("later") as it:
            started = time.monotonic()
            assert await score_all(it, ["x" * n for n in range(50)]) == list(range(50))
            return time.monotonic() - started

    assert asyncio.run(run()) < 3  # one after the other they take 10 s


def test_async_rewards_fail_alone():
    async def run():
        async with pool("later", deadline_s=0.5) as it:
            results = await score_all(it, ["ok", "raise", "hang", "timeout"])
            assert it.replaced == 0
        return results

    fine, raised, hung, timeout = asyncio.run(run())
    assert fine == 2.0
    assert "ValueError: no" in str(raised)
    assert isinstance(hung, LateRewardError)
    assert str(hung) == "`reward_functions:later` did not return within `task.reward_seconds = 0.5`"
    assert "TimeoutError: their own" in str(timeout)


@pytest.mark.parametrize("guilty", ["block", "stubborn"])
def test_an_async_reward_that_cannot_be_cancelled_is_killed(guilty):
    async def run():
        async with pool("later", deadline_s=0.5) as it:
            blocked = asyncio.create_task(it.score("p", guilty, {}), name=guilty)
            await asyncio.sleep(0.1)
            results = await score_all(it, ["ok", "fine"])
            with pytest.raises(RewardError, match="did not return within"):
                await asyncio.wait_for(blocked, 10)
            assert it.replaced == 1
            assert await it.score("p", "after", {}) == 5.0
        return results

    assert asyncio.run(run()) == [2.0, 4.0]


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        ("reward_functions:lenght", "has no `lenght`; did you mean `length`"),
        ("reward_functions:NUMBER", "`NUMBER` is 3, which cannot be called"),
        (
            "no_such_module:reward",
            "there is no module `no_such_module`, neither installed nor in the working directory",
        ),
        ("reward_functions.py:length", "write `reward_functions:length`, without `.py`"),
        ("reward_functions", "is not a function: write it as `package.module:function`"),
        ("reward functions:length", "is not a function"),
    ],
)
def test_a_spec_that_names_no_function_is_refused_at_the_start(spec, pattern):
    async def run():
        await RewardPool(spec).start()

    with pytest.raises(RecipeError, match=f"`task.reward = '{spec}'`.*{pattern}"):
        asyncio.run(run())


def test_a_module_that_fails_to_import_is_named_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text("import json\n1 / 0\n")
    monkeypatch.chdir(tmp_path)

    async def run():
        await RewardPool("broken_reward:reward").start()

    with pytest.raises(RecipeError, match=r"importing `broken_reward` failed: ZeroDivisionError.*broken_reward.py:2"):
        asyncio.run(run())


def test_a_module_that_does_not_parse_is_named_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "unparsed_reward.py").write_text("import json\ndef reward(:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"SyntaxError: invalid syntax \(unparsed_reward\.py:2\)"):
        asyncio.run(RewardPool("unparsed_reward:reward").start())


EDITED = """
import os

def reward(prompt, completion):
    return os._exit(3) if completion == "die" else 1.0
"""


def test_a_module_that_cannot_be_imported_any_more_halts_scoring(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reward_pool, "RETRY_S", 0.05)
    module = tmp_path / "edited_reward.py"

    async def run(*, repaired):
        module.write_text(EDITED)
        it = RewardPool("edited_reward:reward")
        await it.start()
        try:
            assert await it.score("p", "ok", {}) == 1.0
            module.write_text("def reward(:\n")
            with pytest.raises(RewardError, match="ended its process with exit code 3 while it scored this completion"):
                await it.score("p", "die", {})
            if repaired:
                module.write_text(EDITED)
            return await score_all(it, ["ok", "ok"])
        finally:
            await it.close()

    assert asyncio.run(run(repaired=True)) == [1.0, 1.0]
    for error in asyncio.run(run(repaired=False)):
        assert isinstance(error, ScoringHaltedError), "no completion fails because of it"
        assert re.search(r"edited_reward.*SyntaxError.*--resume", str(error))


def test_text_that_a_reward_does_not_parse_is_named_with_the_line_of_the_reward():
    async def run():
        async with pool("parsed") as it:
            return await score_all(it, ["1 +", "3"])

    failed, parsed = asyncio.run(run())
    assert re.search(r"raised SyntaxError: invalid syntax \(reward_functions\.py:\d+\)", str(failed))
    assert parsed == 3.0


def test_a_module_of_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "own_reward.py").write_text("def reward(prompt, completion):\n    return 5\n")
    monkeypatch.chdir(tmp_path)

    async def run():
        it = RewardPool("own_reward:reward")
        await it.start()
        assert await it.score("p", "c", {}) == 5.0
        await it.close()

    asyncio.run(run())


def test_the_worker_imports_nothing_heavy():
    async def run():
        async with pool("as_asked") as it:
            return await it.score("p", "imports", {})

    assert asyncio.run(run()) == 0.0


def test_a_row_larger_than_the_pipe_gets_through():
    async def run():
        async with pool("length") as it:
            return await score_all(it, ["x" * 300_000] * 8)

    assert asyncio.run(run()) == [300_000.0] * 8


def test_a_row_that_cannot_be_sent_fails_alone():
    async def run():
        async with pool("length") as it:
            calls = [it.score("p", "four", {"bonus": value}) for value in (1, lambda: None, 2)]
            return await asyncio.gather(*calls, return_exceptions=True)

    first, unsendable, second = asyncio.run(run())
    assert (first, second) == (5.0, 6.0)
    with pytest.raises(RewardError, match="a row cannot be sent to `reward_functions:length`"):
        raise unsendable


def test_a_row_may_hold_any_type():
    row = {
        "when": datetime(2026, 1, 2, tzinfo=UTC),
        "tags": frozenset({1, 2}),
        "raw": b"\0\1",
        "nested": (1, {"a": {}}),
    }

    async def run():
        async with pool("odd") as it:
            return await it.score("p", "c", row)

    assert asyncio.run(run()) == 2026 + 3 + 2 + 1


class OnlyHere:
    def __reduce__(self):
        return (exec, ("raise RuntimeError('not on this side')",))


def test_a_row_that_does_not_arrive_is_given_up_after_bounded_attempts():
    said = []

    async def run():
        async with pool("length", on_output=said.append) as it:
            with pytest.raises(RewardError, match="3 workers were lost while they had this completion"):
                await asyncio.wait_for(it.score("p", "c", {"bonus": OnlyHere()}), 20)
            assert it.replaced == 3
            assert await it.score("p", "four", {}) == 4.0

    asyncio.run(run())
    assert "not on this side" in "\n".join(said)


def test_a_stopped_worker_is_replaced_and_nobody_is_blamed():
    async def run():
        async with pool("as_asked", deadline_s=0.3) as it:
            os.kill(int(await it.score("p", "pid", {})), signal.SIGSTOP)
            assert await score_all(it, ["ok"] * 3) == [1.0] * 3
            assert it.replaced == 1

    asyncio.run(run())


def test_a_cancelled_call_leaves_the_others_alone():
    async def run():
        async with pool("later") as it:
            calls = [asyncio.create_task(it.score("p", "x" * n, {}), name=str(n)) for n in range(4)]
            await asyncio.sleep(0.05)
            calls[1].cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [results[i] for i in (0, 2, 3)] == [0.0, 2.0, 3.0]
            assert isinstance(results[1], asyncio.CancelledError)
            assert await it.score("p", "again", {}) == 5.0

    asyncio.run(run())


def test_a_closed_pool_scores_nothing():
    async def run():
        async with pool("length") as it:
            await it.close()
            with pytest.raises(RewardError, match="not running"):
                await it.score("p", "c", {})

    asyncio.run(run())


def test_workers_end_with_a_pool_that_was_killed():
    program = f"""
        import asyncio, os, sys
        sys.path.insert(0, {FOLDER!r})
        from stretto.environments.reward_pool import RewardPool

        async def run():
            pool = RewardPool("reward_functions:as_asked")
            await pool.start()
            print(int(await pool.score("p", "pid", {{}})), flush=True)
            await pool.score("p", "hang", {{}})

        asyncio.run(run())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE) as process:
        worker = int(process.stdout.readline())
        assert is_alive(worker)
        process.kill()
    deadline = time.monotonic() + 5
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(worker)


def test_completions_that_wait_behind_ones_that_hang_or_die_are_scored_however_many_those_are():
    async def run():
        async with pool("as_asked", deadline_s=0.2) as it:
            return await score_all(it, [*["hang"] * 4, "ok", "die", "die", "die", "die", "ok"])

    results = asyncio.run(run())
    assert [results[4], results[9]] == [1.0, 1.0]
    assert sum(isinstance(result, RewardError) for result in results) == 8


@pytest.mark.parametrize("deadline_s", [0.2])
def test_completions_that_wait_behind_ones_that_hang_are_told_of_the_deadline_not_of_a_signal(deadline_s):
    async def run():
        async with pool("as_asked", deadline_s=deadline_s) as it:
            return await score_all(it, ["hang"] * 5)

    for failure in asyncio.run(run()):
        assert isinstance(failure, RewardError)
        assert "did not return within `task.reward_seconds = 0.2`" in str(failure)
        assert "SIGKILL" not in str(failure)


@pytest.mark.parametrize(
    ("function", "columns", "words"),
    [
        (
            "only_answer",
            {"question": None},
            r"`def only_answer\(prompt, completion, answer\)` \(reward_functions\.py:\d+\)",
        ),
        ("only_answer", {"question": None}, r"missing a required argument: 'answer'; rows have the column `question`"),
        (
            "only_answer",
            {"question": None, "solution_answer": None},
            r"rows have the columns `question`, `solution_answer`; if a column has that under another name, rename "
            r"it, such as `task\.columns = \{ answer = \"solution_answer\" \}`",
        ),
        ("only_answer", {"answer": "rows.jsonl:7"}, r"takes the column `answer`, which rows.jsonl:7 does not"),
        ("only_text", {}, r"too many positional arguments; rows have no other columns"),
        ("only_text", {}, r"or, for batches, `def only_text\(prompts, completions, \*\*columns\)`"),
    ],
)
def test_a_function_that_cannot_be_called_with_the_rows_is_refused_at_the_start(function, columns, words):
    with pytest.raises(RecipeError, match=words):
        asyncio.run(RewardPool(f"reward_functions:{function}", columns=columns).start())


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        ("only_answer", {"answer": None, "more": "rows.jsonl:7"}),
        ("length", {}),
        ("only_completion", {}),
        ("later", {"a": "rows.jsonl:7"}),
    ],
)
def test_a_function_that_can_be_called_with_the_rows_starts(function, columns):
    async def run():
        async with pool(function, columns=columns):
            pass

    asyncio.run(run())


def test_what_a_reward_prints_is_heard_line_by_line_and_not_on_the_terminal(capfd):
    said = []

    async def run():
        async with pool("as_asked", on_output=said.append) as it:
            await score_all(it, ["print", "print", "ok"])
            for _ in range(100):
                if len(said) < 2:
                    await asyncio.sleep(0.02)

    asyncio.run(run())
    assert said == ["noise on standard output"] * 2
    out, err = capfd.readouterr()
    assert "noise" not in out + err


def test_the_first_lines_of_a_reward_are_shown_and_all_of_them_kept(tmp_path):
    shown = []
    output = RewardOutput(tmp_path / "run" / "reward.log", shown.append)
    output("while it is imported")
    (tmp_path / "run").mkdir()
    for number in range(30):
        output(f"line {number}")
    output.close()
    output.close()
    assert shown[:2] == ["reward: while it is imported", "reward: line 0"]
    assert len(shown) == MAX_SHOWN + 1
    assert "reward.log" in shown[-1]
    assert (tmp_path / "run" / "reward.log").read_text().splitlines() == [f"line {number}" for number in range(30)]


def test_control_characters_of_a_reward_do_not_reach_the_terminal(tmp_path):
    shown = []
    output = RewardOutput(tmp_path / "reward.log", shown.append)
    output("\x1b[31mred\x07 \ttab é")
    output.close()
    assert shown == [r"reward: \x1b[31mred\x07 " "\ttab é"]
    assert (tmp_path / "reward.log").read_text() == "\x1b[31mred\x07 \ttab é\n"


def test_what_a_reward_prints_onto_a_full_disk_costs_those_lines_and_no_reward():
    shown = []

    async def run():
        async with pool("as_asked", on_output=RewardOutput(Path("/dev/full"), shown.append)) as it:
            await score_all(it, ["print"] * 4)
            with pytest.raises(RewardError, match="exit code 7"):
                await it.score("1+1=", "die", {})
            await score_all(it, ["print"] * 12)

    asyncio.run(run())
    told = [line for line in shown if "`/dev/full` cannot be written: " in line]
    assert len(told) == 1
    assert "No space left" in told[0]


# -- a worker that is not to be trusted --------------------------------------------------------------------------------


def test_a_process_that_a_reward_forks_ends_where_it_comes_back_and_says_nothing_to_the_pool():
    said = []

    async def run():
        async with pool("forked", on_output=said.append) as it:
            results = await score_all(it, ["returns", "raises", "exits", "prints", "returns"])
            results += await score_all(it, ["returns"])
            assert it.replaced == 0
        return results

    assert asyncio.run(run()) == [0.0, 1.0, 3.0, 0.0, 0.0, 0.0], "the exit codes of the copies"
    assert "noise of the copy" in said
    assert "ValueError: of the copy" in said


def test_a_process_that_an_async_reward_forks_ends_where_it_comes_back_or_awaits():
    async def run():
        async with pool("forked_later") as it:
            results = await score_all(it, ["returns", "raises", "awaits", "returns"])
            assert it.replaced == 0
        return results

    assert asyncio.run(run()) == [0.0, 1.0, 1.0, 0.0], "the event loop is not the copy's"


def test_a_process_that_a_reward_forks_and_that_stays_holds_nothing_up():
    async def run():
        async with pool("forked") as it:
            (child,) = await score_all(it, ["stays"])
            assert await score_all(it, ["returns"] * 3) == [0.0] * 3
            started = time.monotonic()
            await it.close()
            return int(child), time.monotonic() - started

    child, seconds = asyncio.run(run())
    assert is_alive(child), "it is in a session of its own, which the pool knows nothing of"
    os.kill(child, signal.SIGKILL)
    assert seconds < 5


FORGED = ["pickle", "empty", "nothing", "many", "another", "infinite", "no number", "too much", "twice", "both"]
FORGED += ["short text", "long text", "long", "bytes"]


@pytest.mark.parametrize("forged", FORGED)
def test_what_a_reward_writes_to_the_pipe_of_its_results_runs_nothing_and_fails_its_own_item(forged, tmp_path):
    async def run():
        async with pool("forger") as it:
            row = {"path": str(tmp_path / "made by the pool")}
            results = await score_all(it, ["ok", "ok", forged, "ok"], row)
            assert await score_all(it, ["ok"] * 3) == [1.0] * 3
        return results

    results = asyncio.run(run())
    assert [results[i] for i in (0, 1, 3)] == [1.0] * 3
    with pytest.raises(RewardError, match=r"`reward_functions:forger` wrote something else .*\(a.*; 3 workers"):
        raise results[2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("function", ["forger", "forger_later"])
def test_of_a_large_batch_only_the_item_fails_that_breaks_its_worker(function):
    async def run():
        async with pool(function) as it:
            results = await score_all(it, [*["ok"] * 150, "bytes", *["ok"] * 150])
            assert it.replaced == 3
        return results

    results = asyncio.run(run())
    assert [result for result in results if result != 1.0] == [results[150]]
    assert isinstance(results[150], RewardError)


@given(body=st.binary(max_size=64), counts=st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_whatever_comes_back_is_results_of_what_was_asked_or_a_broken_frame(body, counts):
    for made in (body, struct.pack("<II", *counts) + body):
        with contextlib.suppress(BrokenFrameError):
            read_reward_greeting(made)
        try:
            results = read_results(made, {0, 1, 2})
        except BrokenFrameError:
            continue
        assert results
        assert len({identity for identity, _, _ in results}) == len(results)
        for identity, reward, error in results:
            assert identity in (0, 1, 2)
            assert (reward is None) != (error is None)
            assert reward is None or all(abs(each) <= 1e9 for each in reward)


def test_results_come_back_as_they_were():
    results = [(3, (0.1, 0.5), None), (1, None, "no \u00e9"), (2, (-0.0, 1.0), None), (7, None, "")]
    body = results_frame(results)[LENGTH.size :]
    assert sorted(read_results(body, {1, 2, 3, 7}, 2)) == sorted(results)
    assert len(body) <= max_frame_bytes(4, 2)
    for greeting in (
        Greeting(),
        Greeting("wrong"),
        Greeting(None, True, False, 7, ("one at a time",)),
        Greeting(None, False, True, 2, ("in batches", "one at a time")),
    ):
        assert read_reward_greeting(reward_greeting_frame(greeting)[LENGTH.size :]) == greeting


def test_a_score_that_is_absent_is_a_broken_frame_unless_there_are_several_rewards():
    body = results_frame([(3, (float("nan"), 0.5), None)])[LENGTH.size :]
    with pytest.raises(BrokenFrameError, match="not finite"):
        read_results(body, {3}, 2)
    ((identity, scores, error),) = read_results(body, {3}, 2, may_lack=True)
    assert (identity, scores[1], error) == (3, 0.5, None)
    assert scores[0] != scores[0]


def test_an_error_of_any_length_is_told_and_costs_no_worker():
    async def run():
        async with pool("verbose") as it:
            results = await score_all(it, ["x", "\U0001f600", "\ud800", '"'] * 20)
            assert it.replaced == 0
        return results

    for failure in asyncio.run(run()):
        assert isinstance(failure, RewardError)
        assert str(failure).startswith("`reward_functions:verbose` raised ValueError: ")
        assert len(str(failure).encode()) <= MAX_REASON + 8, "a character that was cut is shown as one that is none"


def test_a_module_that_forks_as_it_is_imported_starts_one_worker(tmp_path, monkeypatch):
    (tmp_path / "forking_reward.py").write_text(
        "import os\nos.fork()\ndef reward(prompt, completion):\n    return os.getpid()\n"
    )
    monkeypatch.chdir(tmp_path)

    async def run():
        it = RewardPool("forking_reward:reward")
        await it.start()
        try:
            return await asyncio.gather(*(it.score("p", "c", {}) for _ in range(5)))
        finally:
            await it.close()

    assert len(set(asyncio.run(run()))) == 1


# -- the environment of a worker ---------------------------------------------------------------------------------------


def test_a_worker_sees_no_variable_that_is_not_among_the_usual_ones_or_named(monkeypatch):
    monkeypatch.setenv("OUR_API_KEY", "secret")
    monkeypatch.setenv("OTHER_TOKEN", "secret too")
    monkeypatch.setenv("LC_TIME", "C")
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    async def run():
        async with pool("variable", extra_environment=named_variables(["OUR_API_KEY"])) as it:
            asked = ["OUR_API_KEY=secret", "OTHER_TOKEN=secret too", "LC_TIME=C", "TZ=UTC", "OMP_NUM_THREADS=1"]
            return await score_all(it, [*asked, f"PATH={os.environ['PATH']}"])

    assert asyncio.run(run()) == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_the_variables_of_a_worker_are_a_list_that_is_known(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    async def run():
        async with pool("num_variables") as it:
            return await score_all(it, ["x"])

    (failure,) = asyncio.run(run())
    seen = set(str(failure).partition("ValueError: ")[2].rpartition(" (")[0].split())
    assert "PATH" in seen
    assert all(name in PASSED or name.startswith("LC_") for name in seen), seen


def test_the_variables_of_a_worker_are_documented():
    text = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert [name for name in sorted(PASSED) if f"`{name}`" not in text] == []


def test_a_variable_that_is_named_and_not_set_is_refused(monkeypatch):
    monkeypatch.delenv("OUR_API_KEY", raising=False)
    with pytest.raises(RecipeError, match=r"`task\.pass_env` names `OUR_API_KEY`, which is not set"):
        named_variables(["OUR_API_KEY"])
