"""The chat template that a task asks for, in a tokenizer: chosen, with values of its variables, and with a prefill."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from chat_cases import ScriptedPolicy, chat_tokenizer
from transformers import AutoTokenizer

from stretto.chat.policy import ChatPolicy
from stretto.chat.rendering import Renderer
from stretto.chat.templates import prefill_of, with_template, write_template
from stretto.errors import RecipeError

ASK = [{"role": "user", "content": "hello"}]
READS = (
    "{% macro thought() %}{{ enable_thinking }}{% endmacro %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }} {{ thought() }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}\n"
)


def rendered(tokenizer: Any, **options: Any) -> str:
    return str(tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True, **options))


def test_without_options_the_tokenizer_is_the_same() -> None:
    tokenizer = chat_tokenizer("hermes")
    assert with_template(tokenizer, variables={}, prefill=None) is tokenizer


def test_variables_are_set_unless_a_caller_sets_them() -> None:
    own = chat_tokenizer("hermes", READS)
    made = with_template(own, variables={"enable_thinking": False})
    assert rendered(made) == "user: hello False\nassistant: "
    assert rendered(made, enable_thinking="yes") == "user: hello yes\nassistant: "
    assert own.chat_template == READS, "the tokenizer of the model is left as it was"
    begins_with_a_line = "\n" + READS
    made = with_template(chat_tokenizer("hermes", begins_with_a_line), variables={"enable_thinking": 1})
    assert rendered(made).startswith("\nuser: hello 1")


@pytest.mark.parametrize("prefill", ["<think>\n", 'say "%}" or {{ x }}', "grüß \N{PARTY POPPER}\\n"])
@pytest.mark.parametrize("family", ["hermes", "llama", "drops thinking"])
def test_a_prefill_follows_the_generation_prompt_and_nothing_else(family: str, prefill: str) -> None:
    own = chat_tokenizer(family)
    made = with_template(own, prefill=prefill)
    assert rendered(made) == rendered(own) + prefill
    assert made.apply_chat_template(ASK, tokenize=False) == own.apply_chat_template(ASK, tokenize=False)
    assert prefill_of(made.chat_template) == prefill
    assert prefill_of(own.chat_template) == ""
    again = with_template(made, prefill="other")
    assert rendered(again) == rendered(own) + "other", "a policy that is trained again has one prefill"


def test_the_template_travels_with_the_tokenizer(tmp_path: Path) -> None:
    made = with_template(chat_tokenizer("hermes", READS), variables={"enable_thinking": [1, "a"]}, prefill="<think>")
    made.save_pretrained(tmp_path)
    for other in (pickle.loads(pickle.dumps(made)), AutoTokenizer.from_pretrained(tmp_path)):
        assert rendered(other) == rendered(made) == "user: hello [1, 'a']\nassistant: <think>"
    several = {"default": "a", "tool_use": "b"}
    write_template(several, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == several


def test_a_template_is_a_file_a_name_or_the_text_itself(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("hermes")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8-sig")
    assert rendered(with_template(tokenizer, chat_template=str(tmp_path / "mine.jinja"))) == "hello!"
    assert rendered(with_template(tokenizer, chat_template="{{ messages[0].content }}?")) == "hello?"
    tokenizer.chat_template = {"default": "d", "short": "{{ messages[0].content }}."}
    assert rendered(with_template(tokenizer, chat_template="short")) == "hello."
    assert rendered(with_template(tokenizer, prefill="x")) == "dx"


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (
            {"chat_template": "nowhere.jinja"},
            r"`task.chat_template = 'nowhere.jinja'` is no file, .* no named templates",
        ),
        ({"chat_template": "empty.jinja"}, "is empty"),
        ({"variables": {"enable_thinkin": True}}, r"`task.template.enable_thinkin` has no .* mean `enable_thinking`\?"),
        (
            {"variables": {"messages": []}},
            "`task.template.messages` cannot be set: `messages` is given with every chat",
        ),
        ({"variables": {"chat_template": "x"}}, r"did you mean `task.chat_template`\?"),
        ({"variables": {"a b": "x"}}, "is no name of a variable"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], pattern: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jinja").write_text(" \n")
    with pytest.raises(RecipeError, match=pattern):
        with_template(chat_tokenizer("hermes", READS), **options)


def test_options_of_a_template_need_one() -> None:
    bare = chat_tokenizer("hermes")
    bare.chat_template = None
    with pytest.raises(RecipeError, match=r"`task.prefill` is for a chat template, and the tokenizer .* has none"):
        with_template(bare, prefill="x")
    assert rendered(with_template(bare, prefill="x", chat_template="{{ 1 }}")) == "1x"


@pytest.mark.parametrize(("prefill", "content", "reasoning"), [("Sure: ", "Sure: 3", None), ("<think>", "", "3")])
def test_a_chat_goes_on_in_one_lineage_behind_a_prefill(prefill: str, content: str, reasoning: str | None) -> None:
    tokenizer = with_template(chat_tokenizer("hermes"), prefill=prefill)
    policy = ScriptedPolicy(tokenizer, "3", "4")
    chat = ChatPolicy(policy, Renderer(tokenizer))

    async def play() -> None:
        messages: list[Any] = [*ASK]
        answer = await chat.chat(messages)
        assert (answer.content, answer.reasoning) == (content, reasoning)
        await chat.chat([*messages, answer.message, {"role": "user", "content": "again"}])

    asyncio.run(play())
    assert chat.num_lineages == 1, "the prefill of the first answer is written again"
