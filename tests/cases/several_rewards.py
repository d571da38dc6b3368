"""Rewards of many forms, for `tests/environments/test_several_rewards.py`. Workers import this module."""

import asyncio
import os
import re
import time


def correct(prompt, completion, answer):
    return float(completion == answer)


def length(completion):
    return len(completion)


def swapped(completion, prompt):
    return float(prompt == "p" and completion == "c")


def as_trl(completions, **kwargs):
    assert "trainer_state" not in kwargs
    return [_scored(text if isinstance(text, str) else text[0]["content"], len(completions)) for text in completions]


def _scored(text, size):
    """Returns what a completion asks for: the size of its batch, or something bad."""
    if text == "raise":
        raise ValueError("a bad completion")
    if text == "hang":
        time.sleep(60)
    if text == "die":
        os._exit(3)
    return {"none": None, "text": "1.0", "nan": float("nan"), "size": size}.get(text, 1.0)


async def as_trl_later(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    if "wait" in completions:
        await asyncio.sleep(60)
    return [_scored(text, len(completions)) for text in completions]


def of_trl(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra=None):
    assert log_extra is None, "it has a default"
    log_metric("share", 0.5)
    for messages, said in zip(prompts, completions, strict=True):
        assert [message["role"] for message in messages] == ["system", "user"]
        assert said[0]["role"] == "assistant"
    step = trainer_state.global_step
    return [sum(ids) + step + len(str(each)) / 10 for ids, each in zip(completion_ids, answer, strict=True)]


def reads_messages(completions, **kwargs):
    return [float(completion[0]["content"] == "c") for completion in completions]


async def reads_messages_later(completions, **kwargs):
    return reads_messages(completions)


def reads_texts(completions, **kwargs):
    return [float(completion.strip() == "c") for completion in completions]


def searches_texts(completions, **kwargs):
    return [float(bool(re.search("c", completion))) for completion in completions]


def reads_whole_message(completions, **kwargs):
    return [float(completion["content"] == "c") for completion in completions]


def reads_one_message(prompt, completion):
    return float(completion[0]["content"] == "c")


def reads_answer(completion, **row):
    return float(completion == row["answer"])


def only_ids(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def too_few(completions):
    return [1.0] * (len(completions) - 1)


def mapping(completions):
    return dict.fromkeys(completions, 1.0)


def one_text(completions):
    return "1" * len(completions)


def unordered(completions):
    return {float(len(completion)) for completion in completions}


def one_number(completions):
    return 1.0


def generated(completions):
    return (float(each == "c") for each in completions)


def other_names(texts, more):
    return [float(len(texts))] * len(texts)


def both(prompt, completions):
    return 1.0


def with_messages(prompt, completion, messages, completion_message):
    return float(len(messages) + 10 * len(completion_message["tool_calls"])) + (
        0.5 if completion_message["reasoning_content"] == "hm" else 0.0
    )


def hidden(prompt, completion, **row):
    return float("messages" not in row and "completion_message" not in row)


def nothing(prompt, completion):
    return None


def raises(prompt, completion):
    if completion == "raise":
        raise KeyError("no such thing")
    return 1.0


def huge(prompt, completion):
    return 1e9


class Counted:
    """Made once in each process, with options."""

    made = 0

    def __init__(self, base=0.0, words=()):
        Counted.made += 1
        self._base = base + len(words)

    def __call__(self, prompt, completion):
        return self._base + Counted.made


def factory(bonus):
    async def reward(completion, **row):
        return bonus

    return reward


def broken_factory(bonus):
    raise OSError("no model here")
