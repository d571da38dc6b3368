"""Worlds of text, played as episodes: reset, then one action after another, each answered with an observation.

The environments of most packages have this shape. An adapter makes a `TextWorld` of one, and `WorldEnvironment` lets
the policy play in it. Each turn earns the reward of its action.

If a row of the data set has `messages`, the world speaks as the user and the policy's answers are the actions; the
first observation is put behind the last message. If it has a `prompt`, everything is plain text without a chat
template: an observation stands on lines of its own, and what the policy samples after it is the action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from stretto.chat.policy import ChatPolicy, TokenPolicy
from stretto.chat.rendering import Renderer
from stretto.environments.protocol import Outcome
from stretto.errors import RecipeError, RoomError
from stretto.types import Prompt


@dataclass(frozen=True, slots=True)
class Observation:
    """The world's answer to an action, or its beginning."""

    text: str
    reward: float = 0.0  # of the action
    over: bool = False  # no action follows


class TextWorld(Protocol):
    """The world of one episode. It must be deterministic: an episode may be run again from its beginning."""

    async def reset(self) -> Observation:
        """Returns the first observation."""
        ...

    async def step(self, action: str) -> Observation:
        """Takes an action."""
        ...

    async def close(self) -> None:
        """Ends the world, after the last step or in the middle of it."""
        ...


class WorldEnvironment:
    """Plays episodes in worlds of text. A subclass defines `world`."""

    def __init__(self, tokenizer: Any, *, turns: int) -> None:
        """`turns`: the most actions of an episode; `task.turns` if it is loaded by a recipe."""
        if turns < 1:
            raise RecipeError(f"`turns = {turns}`: an episode has at least one")
        self._tokenizer = tokenizer
        self._turns = turns
        has_template = getattr(tokenizer, "chat_template", None) is not None
        self._renderer = Renderer(tokenizer) if has_template else None

    def world(self, row: Mapping[str, Any]) -> TextWorld:
        """Returns the world of a row of the data set."""
        raise NotImplementedError(f"{type(self).__name__} does not define `def world(self, row)`")

    async def episode(self, prompt: Prompt, policy: TokenPolicy) -> Outcome:
        """Plays until the world is over, or until turns or tokens are used up."""
        speaker = self._speaker(prompt, policy)
        world = self.world(prompt.row)
        try:
            seen = await world.reset()
            rewards: list[float] = []
            while not seen.over and len(rewards) < self._turns:
                try:
                    action = await speaker.act(seen.text)
                except RoomError:
                    if not rewards:
                        raise
                    break
                seen = await world.step(action)
                rewards.append(float(seen.reward))
            return Outcome(tuple(rewards))
        finally:
            await world.close()

    def _speaker(self, prompt: Prompt, policy: TokenPolicy) -> _Messages | _Lines:
        messages = prompt.row.get("messages")
        if not messages:
            return _Lines(prompt, policy, self._tokenizer)
        if self._renderer is None:
            raise RecipeError("the rows have `messages`, but the tokenizer of `model.path` has no chat template")
        return _Messages(messages, ChatPolicy(policy, self._renderer, prompt_tokens=prompt.tokens))


class _Messages:
    """Speaks to the policy in messages."""

    def __init__(self, messages: list[Mapping[str, Any]], chat: ChatPolicy) -> None:
        self._messages: list[Mapping[str, Any]] = [dict(message) for message in messages]
        self._chat = chat

    async def act(self, observation: str) -> str:
        last = self._messages[-1]
        if last["role"] == "user":  # the prompt: some templates refuse two messages of the user in a row
            both = f"{last['content']}\n\n{observation}" if observation else last["content"]
            self._messages[-1] = {**last, "content": both}
        else:
            self._messages.append({"role": "user", "content": observation})
        answer = await self._chat.chat(self._messages)
        self._messages.append(answer.message)
        return answer.content.strip()


class _Lines:
    """Speaks to the policy in lines of plain text."""

    def __init__(self, prompt: Prompt, policy: TokenPolicy, tokenizer: Any) -> None:
        self._context = list(prompt.tokens)
        self._policy = policy
        self._tokenizer = tokenizer

    async def act(self, observation: str) -> str:
        observed = self._tokenizer.encode(f"\n{observation}\n", add_special_tokens=False)
        turn = await self._policy.generate([*self._context, *observed])
        sampled = turn.tokens.tolist()
        self._context += [*observed, *sampled]
        return str(self._tokenizer.decode(sampled, skip_special_tokens=True)).strip()
