"""Calls of a policy that is not trained."""

from __future__ import annotations

import asyncio

import pytest
from endpoint_cases import FakeConversations, ScriptedPolicy, text_of, tokens_of

from stretto.serve.call_errors import BusyError, InvalidCallError, UnknownKeyError
from stretto.serve.open_access import OpenAccess
from stretto.serve.sessions import Call, RequestedSampling, as_trained

MESSAGES = [{"role": "user", "content": "a"}]


class Gated:
    """A policy whose calls wait."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.given_up = 0
        self.started = asyncio.Semaphore(0)

    async def generate(self, tokens, lineage, train, sampling):
        self.num_waiting += 1
        self.started.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self.num_waiting -= 1


def test_calls_are_generated_at_once_and_given_up_when_nobody_waits():
    async def run():
        policy = Gated()
        access = OpenAccess(policy.generate, lambda _: FakeConversations(), key="k", max_tokens=9)
        clients = [asyncio.create_task(access.ask("k", Call(MESSAGES, identity=b"same")).answer()) for _ in range(3)]
        for _ in clients:
            await policy.started.acquire()
        assert (policy.num_waiting, access.num_open) == (3, 3)
        clients[0].cancel()
        await asyncio.wait([clients[0]])
        while access.num_open == 3:
            await asyncio.sleep(0)
        assert (policy.num_waiting, policy.given_up) == (2, 1)
        await access.close_all()
        await asyncio.wait(clients)
        assert (policy.given_up, access.num_open) == (3, 0)

    asyncio.run(run())


def test_keys_limits_and_rewards():
    async def run():
        policy = Gated()
        access = OpenAccess(policy.generate, None, key="k", max_tokens=9, max_calls=1)
        for wrong in ("", "K", "kk", "schlüssel", "k\udcff"):
            with pytest.raises(UnknownKeyError):
                access.ask(wrong, Call(MESSAGES))
        assert access.max_tokens("k") == 9
        with pytest.raises(InvalidCallError, match="trains nothing"):
            access.reward("k", "any", 1.0)
        with pytest.raises(InvalidCallError, match="send token ids"):
            await access.ask("k", Call(MESSAGES)).answer()
        access.ask("k", Call(tokens=tokens_of("a")))
        with pytest.raises(BusyError):
            access.ask("k", Call(tokens=tokens_of("a")))
        await access.close_all()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("stop", "content"), [((), "1, 2 and more"), (("2 ", "and"), "1, "), (("3",), "1, 2 and more")]
)
def test_an_answer_ends_before_its_stop_string_and_has_all_of_its_tokens(stop, content):
    async def run():
        policy = ScriptedPolicy(lambda number, context: "1, 2 and more")
        access = OpenAccess(as_trained(policy), lambda _: FakeConversations(), key="k", max_tokens=99)
        answer = await access.ask("k", Call(MESSAGES, sampling=RequestedSampling(stop=stop))).answer()
        assert answer.message.message["content"] == content
        assert text_of(answer.tokens) == "1, 2 and more\n"

    asyncio.run(run())
