"""Sessions: order, repeats, rows of tokens, limits and ends."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import weakref
from dataclasses import replace

import pytest
from endpoint_cases import FakeConversations, ScriptedPolicy, opened, text_of, tokens_of

from stretto.errors import SuspendedError
from stretto.serve import call_errors
from stretto.serve import sessions as sessions_module
from stretto.serve.call_errors import (
    BusyError,
    CallError,
    ContextLengthError,
    InvalidCallError,
    OtherRequestError,
    OtherSessionError,
    RefusedCallError,
    RequestSizeError,
    SessionEndedError,
    UnknownKeyError,
)
from stretto.serve.sessions import Call, Limits, Sessions, as_trained


def says(text: str, **other) -> Call:
    return Call([{"role": "user", "content": text}], **other)


def test_a_call_is_answered_with_what_the_policy_sampled():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        session = opened(sessions, policy)
        answer = await sessions.call(session.key, says("hello"))
        assert answer.message.content == "reply 0"
        assert text_of(answer.prompt_tokens) == "<user>hello\n<assistant>"
        assert text_of(answer.tokens) == "reply 0\n"
        assert len(answer.logprobs) == len(answer.tokens)
        assert (answer.finish, answer.lineage, answer.version) == ("stop", 0, 3)
        await sessions.close(session)

    asyncio.run(run())


def test_what_continues_a_row_goes_there_and_anything_else_opens_one():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        session = opened(sessions, policy)
        first = [{"role": "user", "content": "a"}]
        then = [*first, {"role": "assistant", "content": "reply 0"}, {"role": "user", "content": "b"}]
        other = [*first, {"role": "assistant", "content": "forged"}, {"role": "user", "content": "b"}]
        lineages = [(await sessions.call(session.key, Call(each))).lineage for each in (first, then, other, first)]
        assert lineages == [0, 0, 1, 2]
        # Tokens as they are continue the row that the messages made.
        exact = policy.rows[0][0]
        assert (await sessions.call(session.key, Call(tokens=(*exact, *tokens_of("<user>c\n"))))).lineage == 0
        await sessions.close(session)

    asyncio.run(run())


def test_a_call_that_does_not_train_never_shares_a_row_with_one_that_does():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        session = opened(sessions, policy)
        first = [{"role": "user", "content": "a"}]
        then = [*first, {"role": "assistant", "content": "reply 0"}, {"role": "user", "content": "title?"}]
        await sessions.call(session.key, Call(first))
        title = await sessions.call(session.key, Call(then, train=False))
        assert title.lineage == 1
        assert (await sessions.call(session.key, Call(then))).lineage == 0
        assert [trained for _, trained in policy.rows] == [True, False]
        await sessions.close(session)

    asyncio.run(run())


def test_calls_of_a_session_are_answered_in_the_order_in_which_they_came():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy(lambda number, context: context[-13:-12])
        session = opened(sessions, policy)
        pending = [sessions.ask(session.key, says(str(number))) for number in range(9)]
        answers = [await each.answer() for each in pending]
        assert [answer.message.content for answer in answers] == [str(number) for number in range(9)]
        await sessions.close(session)

    asyncio.run(run())


# -- repeats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", ["retry", "unknown"])
def test_a_repeated_call_joins_the_first_and_later_gets_its_answer(attempt):
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy(gate=asyncio.Event())
        session = opened(sessions, policy)
        first = sessions.ask(session.key, says("a", identity=b"a", attempt="first"))
        client = asyncio.create_task(first.answer())
        await policy.started.acquire()
        client.cancel()  # the client is gone; its call is not
        await asyncio.wait([client])
        again = sessions.ask(session.key, says("a", identity=b"a", attempt=attempt))
        assert again is first
        policy.gate.set()
        answer = await again.answer()
        again.delivered = True
        assert (await sessions.call(session.key, says("a", identity=b"a", attempt=attempt))) is answer
        assert policy.num_turns == session.num_calls == 1
        await sessions.close(session)

    asyncio.run(run())


def test_a_client_that_says_it_asks_for_the_first_time_gets_another_sample():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        session = opened(sessions, policy)
        calls = [says("a", identity=b"a", attempt="first") for _ in range(3)]
        answers = await asyncio.gather(*(sessions.call(session.key, call) for call in calls))
        assert [answer.message.content for answer in answers] == ["reply 0", "reply 1", "reply 2"]
        await sessions.close(session)

    asyncio.run(run())


def test_a_retry_stands_for_the_equal_call_that_nobody_got():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        session = opened(sessions, policy)
        call = says("a", identity=b"a", attempt="first")
        lost = sessions.ask(session.key, call)
        await sessions.call(session.key, call)
        assert sessions.ask(session.key, replace(call, attempt="retry")) is lost
        await sessions.close(session)

    asyncio.run(run())


def test_an_idempotency_key_decides_alone():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        session = opened(sessions, policy)
        one = says("a", identity=b"a", idempotency_key="1")
        first = await sessions.call(session.key, one)
        assert await sessions.call(session.key, replace(one, attempt="first")) is first
        assert await sessions.call(session.key, replace(one, idempotency_key="2")) is not first
        with pytest.raises(OtherRequestError, match="used for another request"):
            await sessions.call(session.key, replace(one, identity=b"b"))
        await sessions.close(session)

    asyncio.run(run())


def test_a_call_that_failed_may_be_made_again():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy(max_context=5)
        session = opened(sessions, policy)
        call = says("a", identity=b"a", idempotency_key="1")
        with pytest.raises(ContextLengthError, match="has 19 tokens"):
            await sessions.call(session.key, call)
        policy.max_context = 1_000
        assert (await sessions.call(session.key, call)).lineage == 0
        await sessions.close(session)

    asyncio.run(run())


# -- limits ------------------------------------------------------------------------------------------------------------


def test_limits_of_calls_are_refused_as_what_they_are():
    async def run():
        policy = ScriptedPolicy(gate=asyncio.Event(), max_turns=4)
        sessions = Sessions(Limits(calls=5, waiting=2, request_bytes=100, waiting_bytes=150))
        session = opened(sessions, policy)
        with pytest.raises(RequestSizeError, match="101 bytes; 100 are the most"):
            sessions.ask(session.key, says("", num_bytes=101))
        one = sessions.ask(session.key, says("1", num_bytes=100))
        with pytest.raises(BusyError, match="100 bytes; 150 are the most"):
            sessions.ask(session.key, says("2", num_bytes=100))
        sessions.ask(session.key, says("2", num_bytes=50))
        with pytest.raises(BusyError, match="2 calls"):
            sessions.ask(session.key, says("3"))
        policy.gate.set()
        await one.answer()
        await sessions.call(session.key, says("3", num_bytes=100))
        await sessions.call(session.key, says("4"))
        with pytest.raises(RefusedCallError, match="more than 4 turns"):
            await sessions.call(session.key, says("5"))
        with pytest.raises(RefusedCallError, match="5 calls"):
            await sessions.call(session.key, says("6"))
        await sessions.close(session)

    asyncio.run(run())


def test_messages_that_the_template_refuses_are_the_clients_error():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        session = opened(sessions, policy)
        with pytest.raises(InvalidCallError, match="no role 'clown'"):
            await sessions.call(session.key, Call([{"role": "clown", "content": "a"}]))
        with pytest.raises(InvalidCallError, match="no tokens"):
            await sessions.call(session.key, Call(tokens=()))
        await sessions.call(session.key, says("a"))
        await sessions.close(session)
        without = sessions.open(as_trained(policy), None, max_tokens=9)
        with pytest.raises(InvalidCallError, match="send token ids"):
            await sessions.call(without.key, says("a"))
        await sessions.close(without)

    asyncio.run(run())


def test_a_large_request_is_rendered_beside_the_event_loop(monkeypatch):
    monkeypatch.setattr(sessions_module, "RENDERED_AT_ONCE", 10)
    threads = []

    class Watched(FakeConversations):
        def request(self, *arguments, **options):
            threads.append(threading.current_thread() is threading.main_thread())
            return super().request(*arguments, **options)

    async def run():
        sessions = Sessions()
        session = sessions.open(as_trained(ScriptedPolicy()), Watched(), max_tokens=1_000)
        await sessions.call(session.key, says("a", num_bytes=10))
        await sessions.call(session.key, says("a", num_bytes=11))
        with pytest.raises(InvalidCallError, match="no role 'clown'"):
            await sessions.call(session.key, Call([{"role": "clown", "content": "a"}], num_bytes=11))
        await sessions.close(session)

    asyncio.run(run())
    assert threads == [True, False, False]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_reward_ends_a_session_and_the_same_reward_again_changes_nothing():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        one, other = opened(sessions, policy), opened(sessions, policy)
        with pytest.raises(OtherSessionError):
            sessions.reward(one.key, other.id, 1.0)
        with pytest.raises(InvalidCallError, match="finite"):
            sessions.reward(one.key, one.id, float("nan"))
        with pytest.raises(InvalidCallError, match="largest reward"):
            sessions.reward(one.key, one.id, 1e10)
        sessions.reward(one.key, one.id, 0.5)
        sessions.reward(one.key, one.id, 0.5)
        with pytest.raises(OtherRequestError, match=r"reward 0\.5 already"):
            sessions.reward(one.key, one.id, 1.0)
        assert (await one.ended, one.reward) == ("reward", 0.5)
        with pytest.raises(SessionEndedError, match="it has its reward"):
            await sessions.call(one.key, says("a"))
        await sessions.close(one)
        with pytest.raises(UnknownKeyError):
            await sessions.call(one.key, says("a"))
        await sessions.call(other.key, says("a"))
        await sessions.close_all()
        assert sessions.num_open == 0

    asyncio.run(run())


def test_the_end_refuses_what_waits_and_close_finishes_what_is_generated():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy(gate=asyncio.Event())
        session = opened(sessions, policy)
        generated, waits = (sessions.ask(session.key, says(text)) for text in "ab")
        await policy.started.acquire()
        closing = asyncio.create_task(sessions.close(session))
        with pytest.raises(SessionEndedError, match="its program is over"):
            await waits.answer()
        assert not closing.done()
        policy.gate.set()
        await closing
        assert (await generated.answer()).message.content == "reply 0"
        assert policy.num_turns == 1

    asyncio.run(run())


@pytest.mark.parametrize("begun", [False, True])
def test_a_session_that_is_cancelled_gives_up_its_call(begun):
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy(gate=asyncio.Event())
        session = opened(sessions, policy)
        pending = sessions.ask(session.key, says("a"))
        if begun:
            await policy.started.acquire()
        session.cancel()
        await asyncio.wait_for(sessions.close(session), 60)
        with pytest.raises(SessionEndedError):
            await pending.answer()
        assert not policy.rows

    asyncio.run(run())


def test_a_deadline_ends_a_session():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        session = opened(sessions, policy, deadline_s=0.01)
        assert await asyncio.wait_for(session.ended, 60) == "deadline"
        with pytest.raises(SessionEndedError, match=r"its 0\.01 s are over"):
            await sessions.call(session.key, says("a"))
        await sessions.close(session)

    asyncio.run(run())


@pytest.mark.parametrize("fault", [SuspendedError("it moves"), asyncio.CancelledError()])
def test_an_error_that_is_not_the_clients_ends_the_session_and_is_kept_for_its_owner(fault):
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy(fault=fault)
        session = opened(sessions, policy)
        first, second = (sessions.ask(session.key, says(text)) for text in "ab")
        for pending in (first, second):
            with pytest.raises(SessionEndedError):
                await pending.answer()
        assert (await session.ended, session.failure) == ("failure", fault)
        await sessions.close(session)

    asyncio.run(run())


def test_many_sessions_leave_nothing_behind():
    async def run():
        sessions, made = Sessions(), weakref.WeakSet()

        async def one():
            policy = ScriptedPolicy()
            session = opened(sessions, policy, deadline_s=3_600)
            made.add(session)
            await sessions.call(session.key, says("a", identity=b"a"))
            await sessions.close(session)

        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(50)))
        await asyncio.sleep(0)
        assert sessions.num_open == 0
        assert len(asyncio.all_tasks()) == 1
        gc.collect()
        assert not made

    asyncio.run(run())


def test_errors_survive_pickling():
    kinds = [kind for kind in vars(call_errors).values() if isinstance(kind, type) and issubclass(kind, CallError)]
    for kind in kinds:
        again = pickle.loads(pickle.dumps(kind("said")))
        assert (type(again), str(again), again.status) == (kind, "said", kind.status)
