"""A policy that chats, over one that speaks tokens."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any, Protocol

from stretto.chat.conversations import Conversations
from stretto.chat.messages import AssistantMessage, Message
from stretto.chat.rendering import Renderer
from stretto.chat.tools import AnyTool, as_tools, tool_specs
from stretto.errors import RoomError
from stretto.types import Completion

NO_CALLS_LEFT = "Error: no tool calls are left. Answer without one."


class TokenPolicy(Protocol):
    """The version of the policy that one trajectory was started with."""

    @property
    def left(self) -> int:
        """The number of tokens, observed or sampled, that may follow in lineage 0."""
        ...

    async def generate(self, tokens: Sequence[int], *, lineage: int = 0, train: bool = True) -> Completion:
        """Continues `tokens`, the whole context of a lineage. Raises `RoomError` if no token fits."""
        ...

    def spend(self, amount: float, what: str = "") -> None:
        """Counts an amount that the episode is about to spend. Raises `BudgetError` if it has less left."""
        ...

    def report(self, reward: Any) -> None:
        """Says what the episode has earned so far: its reward if it is cut."""
        ...


class ChatPolicy:
    """The policy of one episode. Calls follow one another: await each before the next."""

    def __init__(self, policy: TokenPolicy, renderer: Renderer, *, prompt_tokens: Sequence[int] | None = None) -> None:
        """`prompt_tokens`: those of the group's prompt, see `Conversations`."""
        self._policy = policy
        self._conversations = Conversations(renderer, prompt_tokens=prompt_tokens)

    @property
    def left(self) -> int:
        """The number of tokens, observed or sampled, that may follow in lineage 0."""
        return self._policy.left

    @property
    def num_lineages(self) -> int:
        """Lineages of this episode so far."""
        return self._conversations.num_lineages

    def spend(self, amount: float, what: str = "") -> None:
        """Counts an amount that the episode is about to spend. Raises `BudgetError` if it has less left."""
        self._policy.spend(amount, what)

    def report(self, reward: Any) -> None:
        """Says what the episode has earned so far, a number or an `Outcome`: its reward if it is cut."""
        self._policy.report(reward)

    async def generate(self, tokens: Sequence[int], *, lineage: int = 0, train: bool = True) -> Completion:
        """Continues a context of tokens, without a chat template. A lineage that does so once is no chat any more."""
        completion = await self._policy.generate(tokens, lineage=lineage, train=train)
        self._conversations.take(lineage)
        return completion

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[AnyTool] | None = None, *, train: bool = True
    ) -> AssistantMessage:
        """Returns the policy's answer. Put its `message` behind `messages` to go on.

        `tools` are functions, or descriptions of tools in the shape of the OpenAI API; they are offered, not called.
        `train = False`: the answer is recorded and never trained on. Raises `RoomError` if no token fits, and
        `ChatError` if the messages cannot be rendered.
        """
        request = self._conversations.request(messages, tool_specs(tools or ()), train=train)
        completion = await self._policy.generate(request.tokens, lineage=request.lineage, train=train)
        return self._conversations.answer(request, completion.tokens.tolist(), completion.finish)

    async def run_tools(
        self, messages: MutableSequence[Message], tools: Sequence[AnyTool], *, max_calls: int = 8, train: bool = True
    ) -> AssistantMessage:
        """Lets the policy answer and call tools until it answers without a call. Returns that answer.

        Puts every answer and every result behind `messages`. After `max_calls` calls it has one more turn, so there are
        at most `max_calls + 1`. If no token is left or an answer is cut, the last answer is returned as it is. Raises
        `RoomError` if not even the first one fits.
        """
        callable_tools = {tool.name: tool for tool in as_tools(tools)}
        num_calls = 0
        answer: AssistantMessage | None = None
        while True:
            try:
                answer = await self.chat(messages, tools, train=train)
            except RoomError:
                if answer is None:
                    raise
                return answer
            messages.append(answer.message)
            if not answer.tool_calls or answer.finish == "length" or num_calls >= max_calls:
                return answer
            for call in answer.tool_calls:
                num_calls += 1
                if num_calls > max_calls:
                    said = NO_CALLS_LEFT
                elif call.error is not None:
                    said = f"Error: this tool call cannot be read: {call.error}"
                elif call.name not in callable_tools:
                    names = ", ".join(callable_tools) or "none"
                    said = f"Error: there is no tool `{call.name:.100}`; there are: {names}"
                else:
                    said = await callable_tools[call.name].call(call.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": said})
