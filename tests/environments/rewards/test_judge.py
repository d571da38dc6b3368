"""A judge over HTTP: away, slow, talking nonsense, refusing, dear. Nothing of that is a reward of 0."""

import asyncio
import sqlite3
import time
from contextlib import asynccontextmanager

import pytest
from judge_cases import FakeJudge, Reply, running

from stretto.environments.reward_calls import Details, RewardSpec
from stretto.environments.reward_pool import RewardPool
from stretto.environments.rewards import judge as judge_module
from stretto.environments.rewards.judge import Judge
from stretto.environments.rewards.judge_options import JudgeOptions
from stretto.environments.rewards.judge_record import Answer, JudgeRecord, Spent, exhausted, key_of
from stretto.environments.scoring_errors import HaltError, ScoringError
from stretto.errors import RecipeError, RewardError, ScoringHaltedError
from stretto.setup.scorers import judge_scorer

COLUMNS = {"answer": None}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(judge_module, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(judge_module, "SHOWN_AFTER_S", 0.05)


def options(server, **changes):
    values = {
        "address": server if isinstance(server, str) else server.url,
        "model": "judge",
        "prompt": "Rate {completion} for {prompt}; right is {answer}.",
        "scale": [0, 10],
        "seconds": 5.0,
        "outage_seconds": 20.0,
    }
    return JudgeOptions.model_validate({**values, **changes})


def scored(asked, *completions, folder=None, note=lambda text: None):
    """Returns the reward or the error of each completion, asked all at once."""
    judge = Judge(asked, folder=None if folder is None else str(folder), columns=COLUMNS, note=note)

    async def score_all():
        calls = (judge("1+1", completion, answer=2) for completion in completions)
        try:
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await judge._session.close()

    return asyncio.run(score_all())


def test_the_judge_gets_the_question_and_its_score_is_the_reward():
    with running(FakeJudge()) as server:
        assert scored(options(server, system="Be strict.", body={"seed": 3}), "two") == [0.7]
    (call,) = server.calls
    assert call == {
        "model": "judge",
        "messages": [
            {"role": "system", "content": "Be strict."},
            {"role": "user", "content": "Rate two for 1+1; right is 2."},
        ],
        "temperature": 0.0,
        "max_tokens": 1024,
        "seed": 3,
    }


def test_calls_are_made_at_once_up_to_the_limit_over_connections_that_are_kept():
    with running(FakeJudge(lambda body: Reply(delay_s=0.1))) as server:
        asked = options(server, concurrency=8)
        assert scored(asked, *map(str, range(24))) == [0.7] * 24
    assert server.most_open == 8
    assert len(server.connections) == 8


def test_completions_with_the_same_question_share_a_call():
    with running(FakeJudge()) as server:
        assert scored(options(server), "two", "two", "two") == [0.7] * 3
    assert len(server.calls) == 1


def test_an_answer_is_kept_for_later_sessions(tmp_path):
    with running(FakeJudge()) as server:
        asked = options(server)
        assert scored(asked, "two", "three", folder=tmp_path) == [0.7, 0.7]
        assert scored(asked, "two", "three", folder=tmp_path) == [0.7, 0.7]
        assert len(server.calls) == 2
        scored(options(server, temperature=0.5), "two", folder=tmp_path)
        assert len(server.calls) == 3
        scored(options(server, cache=False), "two", folder=tmp_path)
        assert len(server.calls) == 4
        assert scored(options(server, scale=[0, 7]), "two", folder=tmp_path) == [1.0]  # read anew, not asked anew
        assert len(server.calls) == 4


def test_a_judge_that_is_away_is_awaited(capsys):
    notes = []
    came_back = time.monotonic() + 0.6
    server = FakeJudge(lambda body: Reply() if time.monotonic() > came_back else Reply(status=503, text="busy"))
    with running(server):
        assert scored(options(server), "two", "three", note=notes.append) == [0.7, 0.7]
    assert any("scoring waits for the judge `judge`" in note and "HTTP 503" in note for note in notes)
    assert notes[-1] == ""
    said = capsys.readouterr().out
    assert "`task.judge.outage_seconds`" in said
    assert "answers again" in said


def test_an_outage_that_lasts_too_long_halts_scoring():
    with running(FakeJudge(lambda body: Reply(status=503, text="busy"))) as server:
        found = scored(options(server, outage_seconds=0.3), "two", "three")
    assert all(isinstance(error, HaltError) for error in found)
    assert "has answered no call for" in str(found[0])
    assert "`--resume`" in str(found[0])


def test_a_server_that_goes_away_halts_scoring():
    with running(FakeJudge()) as server:
        judge = Judge(options(server, outage_seconds=0.3), columns=COLUMNS)
    with pytest.raises(HaltError, match="ClientConnectorError"):
        asyncio.run(judge("1+1", "two", answer=2))


def test_an_outage_ends_with_the_last_question_that_waits_for_it():
    replies = iter([Reply(status=503), Reply(status=400, text="too long"), Reply(status=503), Reply()])
    with running(FakeJudge(lambda body: next(replies))) as server:
        judge = Judge(options(server, outage_seconds=0.5), columns=COLUMNS)

        async def ask_twice():
            with pytest.raises(ScoringError, match="too long"):
                await judge("1+1", "one", answer=2)
            await asyncio.sleep(0.8)  # nothing is asked for longer than an outage may last
            assert await judge("1+1", "two", answer=2) == 0.7
            await judge._session.close()

        asyncio.run(ask_twice())
    assert len(server.calls) == 4


def test_a_call_that_is_too_slow_is_made_again():
    delays = iter([3.0, 0.0])
    with running(FakeJudge(lambda body: Reply(delay_s=next(delays)))) as server:
        assert scored(options(server, seconds=0.3), "two") == [0.7]
    assert len(server.calls) == 2


def test_the_judge_may_say_when_to_ask_again():
    at = []

    def answer(body):
        at.append(time.monotonic())
        return Reply(status=429, text="slow down", headers={"Retry-After": "1"}) if len(at) == 1 else Reply()

    with running(FakeJudge(answer)) as server:
        assert scored(options(server), "two") == [0.7]
    assert at[1] - at[0] >= 1.0


def test_a_question_that_fails_while_others_are_answered_fails_alone():
    def answer(body):
        bad = "bad" in body["messages"][0]["content"]
        return Reply(status=500, text="cannot", delay_s=0.05) if bad else Reply(delay_s=0.01)

    with running(FakeJudge(answer)) as server:
        found = scored(options(server, retries=2, concurrency=2), "bad", *map(str, range(200)))
    assert found[1:] == [0.7] * 200
    assert isinstance(found[0], ScoringError)
    assert "failed 3 times: HTTP 500" in str(found[0])


def test_an_answer_without_a_score_is_asked_again_with_a_reminder():
    texts = iter(["Well...", "12", "8"])
    with running(FakeJudge(lambda body: Reply(next(texts)))) as server:
        assert scored(options(server), "two") == [0.8]
    last = server.calls[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1]["content"] == "Well..."
    assert "outside of 0 to 10. Answer with a number from 0 to 10" in last[-1]["content"]


def test_nonsense_fails_the_completion_and_shows_the_answer():
    with running(FakeJudge(lambda body: Reply("banana"))) as server:
        (found,) = scored(options(server, clarifications=1), "two")
    assert isinstance(found, ScoringError)
    assert "no score in 2 answers (it has no number); the last one: 'banana'" in str(found)
    assert len(server.calls) == 2


def test_a_reply_that_is_no_chat_completion_counts_as_away():
    bodies = iter(["<html>maintenance</html>", {"choices": []}, None])
    with running(FakeJudge(lambda body: Reply(body=next(bodies)))) as server:
        assert scored(options(server), "two") == [0.7]
    assert len(server.calls) == 3


def test_an_address_that_never_answers_with_a_chat_completion_halts_scoring_soon():
    with running(FakeJudge(lambda body: Reply(body="<html>welcome</html>"))) as server:
        found = scored(options(server, outage_seconds=600.0), "two", "three")
    assert all(isinstance(error, HaltError) for error in found)
    assert "4 calls in a row got a reply that is not a chat completion: '<html>welcome</html>'" in str(found[0])
    assert "Correct `task.judge.address`" in str(found[0])
    assert "Wait until" not in str(found[0])
    assert len(server.calls) <= 8


def test_a_judge_that_has_answered_before_may_show_a_page_for_a_while():
    bodies = iter([None, *["<html>maintenance</html>"] * 6, None])
    with running(FakeJudge(lambda body: Reply(body=next(bodies)))) as server:
        assert scored(options(server, concurrency=1), "two", "three") == [0.7, 0.7]
    assert len(server.calls) == 8


def test_an_address_without_a_list_of_models_is_mentioned_at_the_check(capsys):
    with running(FakeJudge(models=None)) as server:
        Judge(options(server), columns=COLUMNS, must_answer=False)
    said = capsys.readouterr().out
    assert f"the list of models could not be read at {server.url}/models ('<html>welcome</html>')" in said
    assert "check `task.judge.address`" in said


def test_a_refused_key_is_named_by_its_variable_and_never_shown(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-wrong-and-secret")
    with running(FakeJudge(key="sk-right")) as server, pytest.raises(Exception, match="JUDGE_KEY") as caught:
        Judge(options(server, api_key_env="JUDGE_KEY"), columns=COLUMNS)
    assert "HTTP 401" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_key_that_expires_halts_scoring_at_once(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-right-and-secret")
    with running(FakeJudge(key="sk-right-and-secret")) as server:
        judge = Judge(options(server, api_key_env="JUDGE_KEY"), columns=COLUMNS)
        assert asyncio.run(_one(judge, "two")) == 0.7
        judge = Judge(options(server, api_key_env="JUDGE_KEY"), columns=COLUMNS)
        server.key = "another"
        with pytest.raises(HaltError, match="`JUDGE_KEY`") as caught:
            asyncio.run(_one(judge, "three"))
    assert "secret" not in str(caught.value)


async def _one(judge, completion):
    try:
        return await judge("1+1", completion, answer=2)
    finally:
        await judge._session.close()


def test_an_unknown_model_halts_scoring_and_the_nearest_name_is_printed(capsys):
    unknown = Reply(status=404, text="The model `juge` does not exist")
    with running(FakeJudge(lambda body: unknown, models=("judge-large", "other"))) as server:
        (found,) = scored(options(server, model="juge"), "two")
    assert isinstance(found, HaltError)
    assert "`task.judge.model`" in str(found)
    assert "the nearest is `judge-large`" in capsys.readouterr().out
    assert len(server.calls) == 1


def test_a_question_that_the_judge_refuses_fails_alone():
    with running(FakeJudge(lambda body: Reply(status=400, text="too long"))) as server:
        (found,) = scored(options(server), "two")
    assert isinstance(found, ScoringError)
    assert "refused the question (HTTP 400 Bad Request: too long)" in str(found)


def test_a_judge_without_credit_halts_scoring():
    with running(FakeJudge(lambda body: Reply(status=429, text="insufficient_quota: pay"))) as server:
        (found,) = scored(options(server), "two")
    assert isinstance(found, HaltError)
    assert "add credit" in str(found)


def test_the_budget_counts_every_session_and_waits_for_calls_in_flight(tmp_path):
    with running(FakeJudge(lambda body: Reply(delay_s=0.05))) as server:
        asked = options(server, budget={"calls": 5}, concurrency=3)
        found = scored(asked, *map(str, range(8)), folder=tmp_path)
        assert found.count(0.7) == 5
        halted = [each for each in found if isinstance(each, HaltError)]
        assert len(halted) == 3
        assert "`task.judge.budget.calls = 5`: 5 calls were answered" in str(halted[0])
        again = scored(asked, *map(str, range(8)), folder=tmp_path)
        assert again.count(0.7) == 5  # from the cache
        assert len(server.calls) == 5
        more = options(server, budget={"calls": 8}, concurrency=3)
        assert scored(more, *map(str, range(8)), folder=tmp_path) == [0.7] * 8
    assert len(server.calls) == 8


def test_tokens_and_dollars_have_budgets():
    dear = options("http://host/v1", budget={"dollars": 1.0, "input_price": 2.0, "output_price": 10.0}).budget
    assert exhausted(Spent(10, 250_000, 49_000), dear) is None
    assert exhausted(Spent(10, 250_000, 50_000), dear) == "`dollars = 1`: 1.00 dollars were used"
    long = options("http://host/v1", budget={"tokens": 300}).budget
    with running(FakeJudge()) as server:
        found = scored(options(server, budget=long.model_dump(), concurrency=1), *map(str, range(5)))
    assert found.count(0.7) == 3  # 110 tokens each
    assert "tokens = 300`: 330 tokens" in str(found[-1])


def test_a_budget_of_tokens_needs_a_judge_that_counts_them():
    with running(FakeJudge(lambda body: Reply(usage=False))) as server:
        (found,) = scored(options(server, budget={"tokens": 300}), "two")
    assert isinstance(found, HaltError)
    assert "limit `calls` instead" in str(found)


def test_the_record_survives_and_is_keyed_by_everything(tmp_path):
    record = JudgeRecord(tmp_path / "judge.sqlite", "j", keeps_answers=True)
    record.add("k", Answer("7", 100, 10))
    record.close()
    again = JudgeRecord(tmp_path / "judge.sqlite", "j", keeps_answers=True)
    assert again.find("k") == Answer("7", 100, 10)
    assert again.spent == Spent(1, 100, 10)
    assert JudgeRecord(tmp_path / "judge.sqlite", "other", keeps_answers=True).spent == Spent()
    assert key_of("a", {"x": 1, "y": 2}) == key_of("a", {"y": 2, "x": 1})
    assert key_of("a", {"x": 1}) != key_of("b", {"x": 1})


def test_a_key_is_in_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    with running(FakeJudge(key="sk-very-secret")) as server:
        assert scored(options(server, api_key_env="JUDGE_KEY"), "two", folder=tmp_path) == [0.7]
    with sqlite3.connect(tmp_path / "judge.sqlite") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert b"secret" not in (tmp_path / "judge.sqlite").read_bytes()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt": None}, "set `prompt` or `prompt_path`"),
        ({"choices": {"A": 1.0, "B": 0.0}}, "and not both"),
        ({"scale": [3, 3]}, "the lowest score comes first"),
        ({"scale": None, "choices": {"A": 1.0, "B": 1.0}}, "nothing to learn"),
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "a"}, "it has 0 groups"),
        ({"budget": {}}, "it limits nothing"),
        ({"budget": {"dollars": 3.0}}, "needs both prices"),
        ({"budget": {"calls": 3, "input_price": 3.0}}, "have no effect without `dollars`"),
        ({"address": "http://user:secret@host/v1"}, "address"),
    ],
)
def test_options_that_cannot_work_are_refused(changes, problem):
    with pytest.raises(ValueError, match=problem):
        options("http://host/v1", **changes)


# -- in its process ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def pool(asked, folder=None, **more):
    built = judge_scorer(asked, "task.judge", folder)
    it = RewardPool([RewardSpec("", built.spec, built=built)], columns=COLUMNS, **more)
    await it.start()
    try:
        yield it
    finally:
        await it.close()


def test_a_judge_of_messages_sees_the_completion_with_its_prefill(tmp_path):
    async def run(server):
        async with pool(options(server), tmp_path) as it:
            chat = [{"role": "user", "content": "1+1"}]
            await it.score("<user>1+1<assistant>So: ", "two", {"answer": 2}, Details(chat, prefill="So: "))
            await it.score("1+1=So: ", "three", {"answer": 2}, Details(None, prefill="So: "))

    with running(FakeJudge()) as server:
        asyncio.run(run(server))
    asked = [call["messages"][-1]["content"] for call in server.calls]
    assert asked == ["Rate So: two for 1+1; right is 2.", "Rate three for 1+1=So: ; right is 2."], (
        "once, in either form"
    )


def test_a_worker_process_judges_and_its_failures_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-right")

    def answer(body):
        return Reply("banana" if "odd" in body["messages"][0]["content"] else "9")

    async def run(server):
        async with pool(options(server, api_key_env="JUDGE_KEY", clarifications=0), tmp_path) as it:
            good, odd = await asyncio.gather(
                it.score("1+1", "two", {"answer": 2}), it.score("1+1", "odd", {"answer": 2}), return_exceptions=True
            )
            assert good == 0.9
            assert isinstance(odd, RewardError)
            assert "'banana'" in str(odd)
            assert it.waiting == ""
            server.key = "another"
            with pytest.raises(ScoringHaltedError, match="`JUDGE_KEY`"):
                await it.score("1+1", "three", {"answer": 2})
            with pytest.raises(ScoringHaltedError, match="`JUDGE_KEY`"):  # from now on
                await it.score("1+1", "four", {"answer": 2})

    with running(FakeJudge(answer, key="sk-right")) as server:
        asyncio.run(run(server))
    assert (tmp_path / "judge.sqlite").is_file()


def test_a_password_file_of_the_user_does_not_replace_the_key(tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text("default login somebody password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JUDGE_KEY", "sk-right")

    async def run(server):
        async with pool(options(server, api_key_env="JUDGE_KEY")) as it:
            return await it.score("1+1", "two", {"answer": 2})

    with running(FakeJudge(key="sk-right")) as server:
        assert asyncio.run(run(server)) == 0.7


def test_the_wait_for_a_judge_that_is_away_is_named():
    away = True

    async def run(server):
        nonlocal away
        async with pool(options(server)) as it:
            reward = asyncio.create_task(it.score("1+1", "two", {"answer": 2}))
            while not it.waiting:
                await asyncio.sleep(0.1)
            assert "scoring waits for the judge `judge`" in it.waiting
            away = False
            assert await reward == 0.7
            assert it.waiting == ""

    with running(FakeJudge(lambda body: Reply(status=503) if away else Reply())) as server:
        asyncio.run(asyncio.wait_for(run(server), 60))


def test_a_judge_whose_process_is_killed_goes_on_and_halts_scoring_if_that_is_repeated():
    slow = True

    async def kill_worker(it):
        while not any(worker.in_flight for worker in it._workers.values()):
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)  # until it asks the judge
        before = it.replaced
        next(iter(it._workers.values())).process.kill()
        while it.replaced == before:
            await asyncio.sleep(0.02)

    async def run(server):
        nonlocal slow
        async with pool(options(server)) as it:
            rewards = [asyncio.create_task(it.score("1+1", word, {"answer": 2})) for word in ("two", "three")]
            await kill_worker(it)
            slow = False
            assert await asyncio.gather(*rewards) == [0.7, 0.7]
            slow = True
            rewards = [asyncio.create_task(it.score("1+1", word, {"answer": 2})) for word in ("four", "five")]
            for _ in range(3):
                await kill_worker(it)
            return await asyncio.gather(*rewards, return_exceptions=True)

    with running(FakeJudge(lambda body: Reply(delay_s=4.0 if slow else 0.0))) as server:
        errors = asyncio.run(asyncio.wait_for(run(server), 60))
    assert [type(error) for error in errors] == [ScoringHaltedError] * 2
    assert "`task.judge` was ended by SIGKILL; 3 workers were lost" in str(errors[0])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"address": "http://127.0.0.1:9/v1"}, "does not answer"),
        ({"prompt": "{completion} {anwser}"}, "did you mean `{answer}`?"),
        ({"prompt": None, "prompt_path": "nowhere.txt"}, "`task.judge.prompt_path = 'nowhere.txt'` cannot be read"),
    ],
)
def test_a_judge_that_cannot_be_used_is_refused_at_the_start(changes, problem):
    async def start(server):
        async with pool(options(server, **changes)):
            pass

    with running(FakeJudge()) as server, pytest.raises(RecipeError, match=r"`task\.judge` cannot be used") as caught:
        asyncio.run(start(server))
    assert problem in str(caught.value)


def test_a_variable_that_is_not_set_is_named():
    with pytest.raises(RecipeError, match=r"`task\.judge\.api_key_env` names `NO_SUCH_KEY`"):
        judge_scorer(options("http://host/v1", api_key_env="NO_SUCH_KEY"), "task.judge", None)
