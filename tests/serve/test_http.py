"""The HTTP server, called by the real client of OpenAI and by clients that do what they should not."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import sys
from pathlib import Path

import aiohttp
import openai
import pytest
from endpoint_cases import ScriptedPolicy, opened, serving, text_of, tokens_of
from openai import AsyncOpenAI

from stretto.errors import RecipeError, SuspendedError
from stretto.serve import http
from stretto.serve.open_access import OpenAccess
from stretto.serve.sessions import Limits, Sessions

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def client(endpoint, session, **options) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=session.key, **options)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


async def post(endpoint, path: str, key: str, body: object, **headers: str) -> tuple[int, dict]:
    """Posts a request without a client library."""
    options = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}", **headers}) as connection,
        connection.post(endpoint.url + path, **options) as response,
    ):
        return response.status, await response.json()


# -- chat --------------------------------------------------------------------------------------------------------------


def test_a_chat_of_the_openai_client_with_tokens_and_logprobs():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        async with serving(sessions) as endpoint, client(endpoint, opened(sessions, policy)) as api:
            made = await api.chat.completions.create(
                model="gpt-any", messages=user("hi"), logprobs=True, extra_body={"return_token_ids": True}
            )
            choice = made.choices[0]
            assert (choice.message.content, choice.finish_reason, made.model) == ("reply 0", "stop", "gpt-any")
            assert text_of(made.prompt_token_ids) == "<user>hi\n<assistant>"
            assert text_of(choice.token_ids) == "reply 0\n"
            assert [entry.logprob for entry in choice.logprobs.content] == [-n / 8 for n in range(1, 9)]
            assert "".join(entry.token for entry in choice.logprobs.content) == "reply 0\n"
            assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (20, 8)
            then = [*user("hi"), choice.message, *user("and?")]
            again = await api.chat.completions.create(model="gpt-any", messages=then)
            assert again.choices[0].message.content == "reply 1"
            assert again.choices[0].logprobs is None
            assert len(policy.rows) == 1

    asyncio.run(run())


def test_tools_go_to_the_model_and_come_back_as_calls():
    async def run():
        replies = ['CALL add {"a": 1}', "two", "none"]
        sessions, policy = Sessions(), ScriptedPolicy(lambda number, context: replies[number])
        async with serving(sessions) as endpoint, client(endpoint, opened(sessions, policy)) as api:
            made = await api.chat.completions.create(model="m", messages=user("1+1?"), tools=[TOOL])
            message = made.choices[0].message
            assert (made.choices[0].finish_reason, message.content) == ("tool_calls", None)
            call = message.tool_calls[0]
            assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
            result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
            then = [*user("1+1?"), message, result]
            made = await api.chat.completions.create(model="m", messages=then, tools=[TOOL], tool_choice="auto")
            assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("two", "stop")
            assert text_of(policy.rows[0][0]).startswith("[add]<user>1+1?\n<assistant>CALL add")
            assert len(policy.rows) == 1
            await api.chat.completions.create(model="m", messages=user("?"), tools=[TOOL], tool_choice="none")
            assert text_of(policy.rows[1][0]).startswith("<user>?")

    asyncio.run(run())


@pytest.mark.parametrize("reply", ["a long reply " * 50, 'let me see CALL add {"a": 1}'])
def test_a_stream_has_the_whole_answer(reply):
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy(lambda number, context: reply)
        async with serving(sessions) as endpoint, client(endpoint, opened(sessions, policy)) as api:
            chunks = await api.chat.completions.create(
                model="m",
                messages=user("hi"),
                tools=[TOOL],
                stream=True,
                logprobs=True,
                stream_options={"include_usage": True},
                extra_body={"return_token_ids": True},
            )
            text, calls, reasons, tokens, logprobs, usage = "", [], [], [], [], None
            async for chunk in chunks:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    calls += choice.delta.tool_calls or []
                    reasons += [choice.finish_reason] if choice.finish_reason else []
                    tokens += getattr(choice, "token_ids", None) or []
                    logprobs += choice.logprobs.content if choice.logprobs else []
            said, _, called = reply.partition("CALL ")
            assert text == said
            assert [call.function.name for call in calls] == (["add"] if called else [])
            assert reasons == ["tool_calls" if called else "stop"]
            assert text_of(tokens) == reply + "\n"
            assert len(logprobs) == len(tokens) == usage.completion_tokens

    asyncio.run(run())


def test_a_stream_that_waits_stays_open_and_may_end_in_an_error(monkeypatch):
    monkeypatch.setattr(http, "KEEP_ALIVE_S", 0.01)

    async def run():
        gate = asyncio.Event()
        sessions, policy = Sessions(), ScriptedPolicy(gate=gate, fault=SuspendedError("it moves"))
        session = opened(sessions, policy)
        async with serving(sessions) as endpoint, aiohttp.ClientSession() as connection:
            body = {"messages": user("hi"), "stream": True}
            headers = {"x-api-key": session.key}
            async with connection.post(f"{endpoint.url}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200
                assert await response.content.readline() == b": waiting for tokens\n"
                gate.set()
                rest = await response.read()
        assert b'"code": "session_ended"' in rest
        assert b"[DONE]" not in rest

    asyncio.run(run())


def test_calls_that_do_not_train_say_so_in_three_ways():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        session = opened(sessions, policy)
        async with serving(sessions) as endpoint, client(endpoint, session) as api:
            create = api.chat.completions.create
            await create(model="m", messages=user("a"))
            await create(model="m", messages=user("b"), extra_body={"train": False})
            await create(model="m", messages=user("c"), extra_headers={"x-stretto-train": "false"})
            await create(model="policy-untrained", messages=user("d"))
            # Equal but for that, it is another call.
            for said in ("yes", "no"):
                await post(
                    endpoint, "/v1/chat/completions", session.key, {"messages": user("b")}, **{"x-stretto-train": said}
                )
        assert [train for _, train in policy.rows] == [True, False, False, False, True, False]

    asyncio.run(run())


def test_a_client_that_times_out_and_tries_again_gets_the_call_that_it_made():
    async def run():
        gate = asyncio.Event()
        sessions, policy = Sessions(), ScriptedPolicy(gate=gate)
        session = opened(sessions, policy)
        async with serving(sessions) as endpoint, client(endpoint, session, max_retries=100, timeout=0.3) as api:
            waiting = asyncio.create_task(api.chat.completions.create(model="m", messages=user("a")))
            await policy.started.acquire()
            first = next(iter(session._by_identity.values()))[0]
            while first.num_waiting:  # until the client gives up for the first time
                await asyncio.sleep(0.01)
            gate.set()
            assert (await waiting).choices[0].message.content == "reply 0"
            # The same once more, and not as a retry, is another sample.
            assert (await api.chat.completions.create(model="m", messages=user("a"))).choices[
                0
            ].message.content == "reply 1"
        assert policy.num_turns == session.num_calls == 2

    asyncio.run(run())


def test_a_client_that_disconnects_in_mid_stream_leaves_a_call_that_can_be_had_again(tmp_path):
    async def run():
        reply = "many words " * 100_000  # more than the buffers of a Unix socket hold
        sessions, policy = Sessions(), ScriptedPolicy(lambda number, context: reply, max_context=10_000_000)
        session = opened(sessions, policy)
        body = {"messages": user("hi"), "stream": True}
        async with serving(sessions, socket=tmp_path / "endpoint"):

            def connected() -> aiohttp.ClientSession:
                connector = aiohttp.UnixConnector(str(tmp_path / "endpoint"))
                return aiohttp.ClientSession("http://any", connector=connector, headers={"x-api-key": session.key})

            async with connected() as connection:
                response = await connection.post("/v1/chat/completions", json=body)
                await response.content.readline()
                response.close()
            pending = next(iter(session._by_identity.values()))[0]
            assert not pending.delivered
            async with connected() as connection:
                response = await connection.post("/v1/chat/completions", json=body)
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
            assert pending.delivered
        assert policy.num_turns == 1

    asyncio.run(run())


# -- the other addresses -----------------------------------------------------------------------------------------------


def test_tokens_in_and_out():
    async def run():
        sessions, policy = Sessions(vocabulary=256), ScriptedPolicy()
        session = opened(sessions, policy)
        async with serving(sessions) as endpoint:
            path, context = "/inference/v1/generate", tokens_of("abc")
            body = {"model": "m", "token_ids": context, "sampling_params": {"max_tokens": 5, "logprobs": 1}}
            status, made = await post(endpoint, path, session.key, body)
            assert status == 200
            choice = made["choices"][0]
            assert text_of(choice["token_ids"]) == "reply 0\n"
            assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-n / 8 for n in range(1, 9)]
            assert (choice["finish_reason"], made["prompt_token_ids"]) == ("stop", list(context))
            longer = [*context, *choice["token_ids"], 65]
            await post(endpoint, path, session.key, {"token_ids": longer})
            assert len(policy.rows) == 1
            for wrong in ({"token_ids": []}, {"token_ids": "abc"}, {"token_ids": [True]}, {"token_ids": [256]}, {}):
                status, made = await post(endpoint, path, session.key, wrong)
                assert (status, made["error"]["type"]) == (400, "invalid_request_error")

    asyncio.run(run())


def test_models_say_how_long_a_context_may_be():
    async def run():
        sessions = Sessions()
        async with serving(sessions) as endpoint, client(endpoint, opened(sessions, ScriptedPolicy())) as api:
            models = [model async for model in api.models.list()]
            assert [(model.id, model.max_model_len) for model in models] == [("policy", 1_000)]
            assert (await api.models.retrieve("org/any")).max_model_len == 1_000

    asyncio.run(run())


def test_a_program_gives_its_own_reward():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        one, other = opened(sessions, policy), opened(sessions, policy)
        async with serving(sessions) as endpoint:
            path = f"/sessions/{one.id}/reward"
            assert (await post(endpoint, path, other.key, {"reward": 1}))[0] == 403
            for wrong in ({}, {"reward": "1"}, {"reward": True}, {"reward": 1e999}, {"reward": 10**400}):
                assert (await post(endpoint, path, one.key, wrong))[0] == 400
            assert (await post(endpoint, path, one.key, {"reward": 0.5}))[0] == 200
            assert (await post(endpoint, path, one.key, {"reward": 0.5}))[0] == 200
            assert (await post(endpoint, path, one.key, {"reward": 0.6}))[0] == 422
            assert one.reward == 0.5
            async with client(endpoint, one) as api:
                with pytest.raises(openai.PermissionDeniedError, match="it has its reward"):
                    await api.chat.completions.create(model="m", messages=user("a"))

    asyncio.run(run())


# -- errors ------------------------------------------------------------------------------------------------------------


def test_keys_that_are_missing_closed_or_never_were():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        closed = opened(sessions, policy)
        await sessions.close(closed)
        async with serving(sessions) as endpoint, client(endpoint, closed) as api:
            with pytest.raises(openai.AuthenticationError, match="no open session has this key"):
                await api.chat.completions.create(model="m", messages=user("a"))
            with pytest.raises(openai.AuthenticationError):
                await api.models.list()
            async with aiohttp.ClientSession() as connection:
                for headers in ({}, {"Authorization": "Basic abc"}, {"Authorization": "Bearer"}, {"x-api-key": "no"}):
                    async with connection.get(f"{endpoint.url}/v1/models", headers=headers) as response:
                        assert response.status == 401
                async with connection.get(f"{endpoint.url}/health") as response:
                    assert response.status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\xff\x00", "no JSON"),
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        ([1], "JSON list"),
        ({}, "`messages` is missing"),
        ({"messages": "hi"}, "`messages` is 'hi'"),
        ({"messages": [3]}, r"`messages\[0\]` is a JSON number"),
        ({"messages": [{"content": "a"}]}, "has no `role`"),
        ({"messages": [{"role": "clown", "content": "a"}]}, "cannot be rendered"),
        ({"messages": user("a"), "n": 2}, "`n` is 2"),
        ({"messages": user("a"), "stream": "yes"}, "`stream` is 'yes'"),
        ({"messages": user("a"), "temperature": "hot"}, "`temperature` is 'hot'"),
        ({"messages": user("a"), "max_tokens": 0}, "`max_tokens` is 0"),
        ({"messages": user("a"), "stop": [1]}, "`stop` is"),
        ({"messages": user("a"), "tools": [{"type": "web"}]}, r"`tools\[0\]`"),
        ({"messages": user("a"), "tool_choice": "required"}, "cannot be enforced"),
        ({"messages": user("a"), "response_format": {"type": "json_object"}}, "cannot be enforced"),
        ({"messages": user("a"), "top_logprobs": 5}, "`top_logprobs` is 5"),
    ],
)
def test_garbage_is_refused_in_the_shape_of_openai(body, said):
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        session = opened(sessions, policy)
        async with serving(sessions) as endpoint:
            status, made = await post(endpoint, "/v1/chat/completions", session.key, body)
            assert (status, made["error"]["type"]) == (400, "invalid_request_error")
            with pytest.raises(ValueError, match=said):
                raise ValueError(made["error"]["message"])
        assert policy.num_turns == 0

    asyncio.run(run())


def test_limits_and_wrong_addresses_are_errors_that_clients_understand():
    async def run():
        sessions = Sessions(Limits(request_bytes=1_000))
        session = opened(sessions, ScriptedPolicy(max_context=30))
        async with serving(sessions) as endpoint, client(endpoint, session, max_retries=0) as api:
            with pytest.raises(openai.BadRequestError, match="no token fits") as found:
                await api.chat.completions.create(model="m", messages=user("a" * 30))
            assert found.value.code == "context_length_exceeded"
            with pytest.raises(openai.APIStatusError, match="more than 1,000 bytes") as found:
                await api.chat.completions.create(model="m", messages=user("a" * 2_000))
            assert found.value.status_code == 413
            for path, status in (("/v1/embeddings", 404), ("/v1/models", 405)):
                found_status, made = await post(endpoint, path, session.key, {})
                assert (found_status, made["error"]["code"]) == (status, "not_found")
            # Cut to what fits.
            made = await api.chat.completions.create(model="m", messages=user("a" * 10))
            assert made.choices[0].finish_reason == "length"

    asyncio.run(run())


def test_a_fault_of_the_server_is_one_call_that_fails(caplog):
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy()
        session = opened(sessions, policy)
        async with serving(sessions) as endpoint:
            asked, sessions.ask = sessions.ask, None
            status, made = await post(endpoint, "/v1/chat/completions", session.key, {"messages": user("a")})
            assert (status, made["error"]["code"]) == (500, "internal_error")
            sessions.ask = asked
            assert (await post(endpoint, "/v1/chat/completions", session.key, {"messages": user("a")}))[0] == 200

    asyncio.run(run())
    assert "a call of the endpoint failed" in caplog.text


def test_a_key_of_bytes_that_are_no_text_is_a_wrong_one():
    async def run():
        async def nothing(*_):
            raise AssertionError

        for calls in (Sessions(), OpenAccess(nothing, None, key="k", max_tokens=9)):
            async with serving(calls) as endpoint:
                reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.url.rpartition(":")[2]))
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nx-api-key: k\xff\r\n\r\n")
                assert b" 401 " in await reader.readline()
                writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_take_its_answer_is_disconnected(stream, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(http, "ANSWER_S", 0.1)

    async def run():
        reply = "many words " * 100_000  # more than the buffers of a Unix socket hold
        sessions, policy = Sessions(), ScriptedPolicy(lambda number, context: reply, max_context=10_000_000)
        session = opened(sessions, policy)
        body = json.dumps({"messages": user("hi"), "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nx-api-key: {session.key}\r\n"
        async with serving(sessions, socket=tmp_path / "endpoint") as endpoint:
            lazy = socket.socket(socket.AF_UNIX)
            lazy.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(lazy, str(tmp_path / "endpoint"))
            await loop.sock_sendall(lazy, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await policy.started.acquire()
            while endpoint._runner.server.connections:
                await asyncio.sleep(0.01)
            lazy.close()
            (pending,) = next(iter(session._by_identity.values()))
            assert not pending.delivered
            assert (await post(endpoint, "/v1/chat/completions", session.key, {"messages": user("b")}))[0] == 200

    asyncio.run(asyncio.wait_for(run(), 60))
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_an_endpoint_may_have_as_many_connections_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = http.OPEN_FILES if hard == resource.RLIM_INFINITY else min(http.OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, wanted), hard))

    async def run():
        async with serving():
            return resource.getrlimit(resource.RLIMIT_NOFILE)

    try:
        assert asyncio.run(run()) == (wanted, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_closing_answers_those_who_wait_and_leaves_nothing():
    async def run():
        gate = asyncio.Event()
        sessions, policy = Sessions(), ScriptedPolicy(gate=gate)
        session = opened(sessions, policy)
        async with serving(sessions) as endpoint:
            ask = [post(endpoint, "/v1/chat/completions", session.key, {"messages": user(text)}) for text in "ab"]
            first = asyncio.create_task(ask[0])
            await policy.started.acquire()
            second = asyncio.create_task(ask[1])
            while session.num_calls < 2:
                await asyncio.sleep(0.01)
            closing = asyncio.create_task(endpoint.close())
            status, made = await second
            assert (status, made["error"]["code"]) == (403, "session_ended")
            gate.set()
            assert (await first)[0] == 200
            await closing
            with pytest.raises(aiohttp.ClientConnectionError):
                await post(endpoint, "/v1/chat/completions", session.key, {})
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_port_that_is_taken_and_a_missing_package_are_named(monkeypatch):
    async def run():
        async with serving() as endpoint:
            port = int(endpoint.url.rpartition(":")[2])
            with pytest.raises(RecipeError, match=f"cannot listen on `127.0.0.1:{port}`"):
                async with serving(port=port):
                    pass
        with pytest.raises(RecipeError, match="set `TMPDIR`"):
            async with serving(socket=Path("/tmp") / ("long" * 50)):
                pass
        monkeypatch.setitem(sys.modules, "aiohttp", None)
        with pytest.raises(RecipeError, match=r"pip install 'stretto\[serve\]'"):
            async with serving():
                pass

    asyncio.run(run())


def test_a_unix_socket_serves_the_same(tmp_path):
    async def run():
        sessions = Sessions()
        session = opened(sessions, ScriptedPolicy())
        path = tmp_path / "endpoint"
        async with serving(sessions, socket=path):
            connector = aiohttp.UnixConnector(str(path))
            async with (
                aiohttp.ClientSession(connector=connector, headers={"x-api-key": session.key}) as connection,
                connection.get("http://any/v1/models") as response,
            ):
                assert response.status == 200

    asyncio.run(run())
