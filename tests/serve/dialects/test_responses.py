"""The responses of OpenAI, by its real client."""

from __future__ import annotations

import asyncio

import openai
import pytest
from endpoint_cases import ScriptedPolicy, opened, serving, text_of
from openai import AsyncOpenAI

from stretto.serve.call_errors import InvalidCallError
from stretto.serve.dialects.responses import read
from stretto.serve.sessions import Sessions


def client(endpoint, session) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=session.key)


TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


def test_a_program_that_calls_a_tool_has_one_row_of_tokens():
    async def run():
        replies = ['I add CALL add {"a": 1}', "two"]
        sessions, policy = Sessions(), ScriptedPolicy(lambda number, context: replies[number])
        session = opened(sessions, policy)
        async with (
            serving(sessions) as endpoint,
            client(endpoint, session) as api,
        ):
            items = [{"role": "user", "content": "1+1?"}]
            options = {"model": "m", "instructions": "be brief", "tools": [TOOL]}
            made = await api.responses.create(input=items, extra_body={"return_token_ids": True}, **options)
            assert (made.status, made.output_text) == ("completed", "I add ")
            call = made.output[1]
            assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 1}')
            assert text_of(call.generation_token_ids) == replies[0] + "\n"
            assert len(call.generation_log_probs) == len(call.generation_token_ids)
            items += [item.model_dump() for item in made.output]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
            made = await api.responses.create(input=items, **options)
            assert made.output_text == "two"
            assert made.usage.output_tokens == 4
        assert len(policy.rows) == 1
        assert text_of(policy.rows[0][0]).startswith("[add]<system>be brief\n<user>1+1?\n<assistant>I add CALL")

    asyncio.run(run())


@pytest.mark.parametrize("reply", ["a long reply " * 50, 'I add CALL add {"a": 1}'])
def test_a_stream_has_the_whole_answer(reply):
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy(lambda number, context: reply)
        session = opened(sessions, policy)
        async with (
            serving(sessions) as endpoint,
            client(endpoint, session) as api,
            api.responses.stream(model="m", input="hi", tools=[TOOL]) as events,
        ):
            kinds = [event.type async for event in events]
            made = await events.get_final_response()
        said, _, called = reply.partition("CALL ")
        assert made.output_text == said
        assert [item.type for item in made.output] == ["message", "function_call"][: 2 if called else 1]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")

    asyncio.run(run())


def test_an_answer_that_is_cut_is_incomplete_and_errors_are_those_of_openai():
    async def run():
        sessions, policy = Sessions(), ScriptedPolicy(max_context=25)
        session = opened(sessions, policy)
        async with (
            serving(sessions) as endpoint,
            client(endpoint, session) as api,
        ):
            made = await api.responses.create(model="m", input="hi")
            assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            with pytest.raises(openai.BadRequestError, match="answers are not kept here"):
                await api.responses.create(model="m", input="hi", previous_response_id="resp_1")

    asyncio.run(run())


def test_items_of_one_answer_are_one_message():
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": each} for each in ("be ", "brief")]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "x"}]},
    ]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert read({"input": items}).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": 3},
        {"input": [3]},
        {"input": [{"role": "clown", "content": ""}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "web_search_call"}]},
        {"input": "a", "tools": [{"type": "web_search"}]},
        {"input": "a", "tool_choice": "required"},
        {"input": "a", "text": {"format": {"type": "json_schema"}}},
    ],
)
def test_what_cannot_be_rendered_or_enforced_is_refused(body):
    with pytest.raises(InvalidCallError):
        read(body)
