"""The messages of Anthropic."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from endpoint_cases import ScriptedPolicy, opened, serving, text_of

from stretto.serve.call_errors import InvalidCallError
from stretto.serve.dialects.messages import read
from stretto.serve.sessions import Sessions

TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}


async def post(endpoint, key: str, body: object) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(headers={"x-api-key": key}) as connection,
        connection.post(f"{endpoint.url}/v1/messages", json=body) as response,
    ):
        return response.status, await response.read()


def test_a_program_that_calls_a_tool_has_one_row_of_tokens():
    async def run():
        replies = ['I add CALL add {"a": 1}', "two"]
        sessions, policy = Sessions(), ScriptedPolicy(lambda number, context: replies[number])
        session = opened(sessions, policy)
        async with serving(sessions) as endpoint:
            messages = [{"role": "user", "content": "1+1?"}]
            body = {"model": "m", "max_tokens": 9, "system": "be brief", "messages": messages, "tools": [TOOL]}
            status, raw = await post(endpoint, session.key, body)
            made = json.loads(raw)
            assert (status, made["stop_reason"]) == (200, "tool_use")
            text, call = made["content"]
            assert (text["text"], call["name"], call["input"]) == ("I add ", "add", {"a": 1})
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "2"}]}
            messages += [{"role": "assistant", "content": made["content"]}, {"role": "user", "content": [result]}]
            made = json.loads((await post(endpoint, session.key, body))[1])
            assert (made["content"], made["stop_reason"]) == ([{"type": "text", "text": "two"}], "end_turn")
            assert made["usage"]["output_tokens"] == 4
        assert len(policy.rows) == 1
        assert text_of(policy.rows[0][0]).startswith("[add]<system>be brief\n<user>1+1?\n<assistant>I add CALL")

    asyncio.run(run())


@pytest.mark.parametrize("reply", ["a long reply " * 50, 'I add CALL add {"a": 1}'])
def test_a_stream_has_the_whole_answer(reply):
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy(lambda number, context: reply)
        session = opened(sessions, policy)
        async with serving(sessions) as endpoint:
            body = {"stream": True, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
            raw = (await post(endpoint, session.key, body))[1].decode()
        events = [json.loads(line.removeprefix("data: ")) for line in raw.splitlines() if line.startswith("data: ")]
        assert [event["type"] for event in events] == [
            line.removeprefix("event: ") for line in raw.splitlines() if line.startswith("event: ")
        ]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        said, _, called = reply.partition("CALL ")
        assert "".join(delta.get("text", "") for delta in deltas) == said
        assert "".join(delta.get("partial_json", "") for delta in deltas) == ('{"a": 1}' if called else "")
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
        assert events[-2]["delta"]["stop_reason"] == ("tool_use" if called else "end_turn")

    asyncio.run(run())


def test_arguments_that_are_no_json_come_back_as_they_were():
    async def run():
        replies = ["CALL add {oops", "sorry"]
        sessions, policy = Sessions(), ScriptedPolicy(lambda number, context: replies[number])
        session = opened(sessions, policy)
        async with serving(sessions) as endpoint:
            messages = [{"role": "user", "content": "1+1?"}]
            made = json.loads((await post(endpoint, session.key, {"messages": messages}))[1])
            assert made["content"][0]["input"] == {"invalid_json": "{oops"}
            messages += [{"role": "assistant", "content": made["content"]}, {"role": "user", "content": "what?"}]
            await post(endpoint, session.key, {"messages": messages})
        assert len(policy.rows) == 1

    asyncio.run(run())


def test_errors_are_those_of_anthropic():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy(max_context=25)
        session = opened(sessions, policy)
        async with serving(sessions) as endpoint:
            status, raw = await post(endpoint, "no key", {})
            assert (status, json.loads(raw)["error"]["type"]) == (401, "authentication_error")
            status, raw = await post(endpoint, session.key, {})
            assert (status, json.loads(raw)["error"]["type"]) == (400, "invalid_request_error")
            long = {"messages": [{"role": "user", "content": "long " * 9}]}
            status, raw = await post(endpoint, session.key, long)
            assert status == 400
            assert json.loads(raw)["error"]["message"].startswith("prompt is too long")

    asyncio.run(run())


def test_blocks_become_messages():
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "ä"}}
    messages = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, use]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "x"},
                {"type": "text", "text": "and "},
                {"type": "text", "text": "now?"},
            ],
        },
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ä"}'}}
    read_ = read({"messages": messages, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"]})
    assert read_.sampling.stop == ("x",)
    assert read_.messages == [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "user", "content": "and now?"},
    ]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": [{"role": "clown", "content": ""}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "web_search_20250305", "name": "w"}]},
        {"messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": "any"}},
    ],
)
def test_what_cannot_be_rendered_or_enforced_is_refused(body):
    with pytest.raises(InvalidCallError):
        read(body)
