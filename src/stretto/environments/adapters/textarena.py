"""Games of textarena as episodes: for one player, or for two with an opponent that does not learn.

The policy sees what the game tells its player since its last move, without its own words. An episode earns what the
game gives its player at the end; a game that is not over when turns or tokens are used up earns nothing.

The games draw from Python's and numpy's global random generators. An episode may be run again, so each has a state of
these generators of its own, which is in place while its game moves. All games therefore move in one thread.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from stretto.environments.adapters.packages import function_option, optional_module
from stretto.environments.adapters.text_worlds import Observation, TextWorld, WorldEnvironment
from stretto.errors import RecipeError, RewardError

INSTALL = "pip install 'stretto[textarena]'"
RANDOM = "random"
MAX_OPPONENT_MOVES = 1_000  # in a row: a game that never comes back to the policy

_LISTED = re.compile(r"(?:available|valid|legal)\b[^\n:]*:([^\n]*\[[^\n]*)", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]\n]+\]")
_one_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="textarena")

Opponent = Callable[[str], str]


class TextArenaEnvironment(WorldEnvironment):
    """Plays a game of textarena, a new one for each episode."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        id: str,
        turns: int,
        options: Mapping[str, Any] | None = None,
        opponent: str | None = None,
        player: int = 0,
    ) -> None:
        """`id` and `options` go to `textarena.make`. Columns of a row: `seed`, and `player` if that differs by row.

        `opponent` plays the other side: `random` draws from the moves that the game lists, and
        `package.module:function` is called with all that the opponent has seen. It may draw from `random`. Without one,
        the game is for one player.
        """
        super().__init__(tokenizer, turns=turns)
        self._textarena = optional_module("textarena", package="textarena", install=INSTALL)
        self._options = dict(options or {})
        self._opponent = random_move if opponent == RANDOM else function_option("opponent", opponent)
        self._num_players = 1 if self._opponent is None else 2
        self._player = player
        self._id, self._adds_brackets = self._without_wrappers(id)
        self._check_player(player)
        try:
            with _random_state(_Generators(0)):
                self._make().reset(num_players=self._num_players, seed=0)
        except Exception as error:  # a game may raise anything
            hint = "" if self._opponent else "; if it is a game for two, set `task.config.opponent`"
            raise RecipeError(f"the game `{id}` of textarena cannot be played here: {_short(error)}{hint}") from error

    def world(self, row: Mapping[str, Any]) -> TextWorld:
        player = int(row.get("player", self._player))
        self._check_player(player)
        return _Game(self._make, self._opponent, player, int(row.get("seed", 0)), self._textarena.ObservationType)

    def _make(self) -> Any:
        game = self._textarena.make(self._id, **self._options)
        return self._textarena.wrappers.ActionFormattingWrapper(game) if self._adds_brackets else game

    def _without_wrappers(self, id: str) -> tuple[str, bool]:
        """Returns the name of a game that shows single messages, and True if it adds brackets to moves."""
        games = self._textarena.envs.registration.ENV_REGISTRY
        if id not in games:
            raise RecipeError(f"`task.config.id = {id!r}` is no game of textarena; one is `GuessTheNumber-v0`")
        brackets = self._textarena.wrappers.ActionFormattingWrapper in (games[id].default_wrappers or ())
        bare = f"{id.removesuffix('-train')}-raw"
        return (bare if bare in games else id), brackets

    def _check_player(self, player: int) -> None:
        if not 0 <= player < self._num_players:
            raise RecipeError(
                f"`player = {player}`: the players here are numbered from 0, and there are {self._num_players}"
            )


class _Game:
    """One game, from the place of one player."""

    def __init__(
        self, make: Callable[[], Any], opponent: Opponent | None, player: int, seed: int, message_types: Any
    ) -> None:
        self._make, self._opponent, self._player, self._seed = make, opponent, player, seed
        self._own_move = message_types.PLAYER_ACTION
        self._generators = _Generators(seed)
        self._game: Any = None
        self._seen_by_opponent = ""

    async def reset(self) -> Observation:
        return await self._in_thread(self._reset)

    async def step(self, action: str) -> Observation:
        return await self._in_thread(partial(self._step, action))

    async def close(self) -> None:
        """Waits for a move in progress. While a game hangs, no episode ends, so its worker process is replaced."""
        await asyncio.get_running_loop().run_in_executor(_one_thread, lambda: None)

    async def _in_thread(self, work: Callable[[], Observation]) -> Observation:
        def drawn() -> Observation:
            with _random_state(self._generators):
                return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(_one_thread, drawn)
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"the game of textarena raised {_short(error)}") from error

    def _reset(self) -> Observation:
        self._game = self._make()
        self._game.reset(num_players=1 if self._opponent is None else 2, seed=self._seed)
        return self._until_own_turn(False)

    def _step(self, action: str) -> Observation:
        over, _ = self._game.step(action)
        return self._until_own_turn(bool(over))

    def _until_own_turn(self, over: bool) -> Observation:
        for _ in range(MAX_OPPONENT_MOVES):
            if over:
                rewards, _ = self._game.close()
                return Observation("", float((rewards or {}).get(self._player, 0.0)), over=True)
            player, messages = self._game.get_observation()
            if player == self._player:
                return Observation(self._text(player, messages))
            if self._opponent is None:
                raise RewardError(f"the game of textarena asks player {player}, and there is no opponent")
            self._seen_by_opponent += f"\n{self._text(player, messages, own=True)}"
            over, _ = self._game.step(self._opponent(self._seen_by_opponent))
        raise RewardError(f"the opponent has moved {MAX_OPPONENT_MOVES} times, and the policy was not asked")

    def _text(self, player: int, messages: Any, *, own: bool = False) -> str:
        if isinstance(messages, str):  # a game whose messages are always joined
            return messages
        parts = []
        for sender, text, kind in messages:
            if sender == player and kind == self._own_move and not own:
                continue
            parts.append(text if sender < 0 else f"[Player {sender}] {text}")
        return "\n".join(parts)


def random_move(observation: str) -> str:
    """Returns one of the moves that a game lists last in what the opponent has seen."""
    listed = _LISTED.findall(observation)
    moves: list[str] = _MOVE.findall(listed[-1]) if listed else []
    if not moves:
        raise RewardError(
            "`opponent = 'random'` knows no move: this game does not list them; set `task.config.opponent` to a "
            "`package.module:function` that plays"
        )
    return random.choice(moves)


class _Generators:
    """The states of the global random generators that one game has."""

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed).getstate()
        self.numpy = np.random.RandomState(seed % 2**32).get_state()


@contextmanager
def _random_state(own: _Generators) -> Iterator[None]:
    """Puts a game's random generators in place, and the process's own back afterwards."""
    outer_python, outer_numpy = random.getstate(), np.random.get_state()
    random.setstate(own.python)
    np.random.set_state(own.numpy)
    try:
        yield
    finally:
        own.python, own.numpy = random.getstate(), np.random.get_state()
        random.setstate(outer_python)
        np.random.set_state(outer_numpy)


def _short(error: Exception) -> str:
    """Returns an error in one short line: those of nltk are pages long."""
    text = " ".join(str(error).replace("*", "").split())
    return f"{type(error).__name__}: {text:.200}"
