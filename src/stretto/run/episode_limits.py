"""The limit that an episode reached, which is recorded with its trajectory."""

from __future__ import annotations

from stretto.run.episodes import Episode
from stretto.run.turns import Turns
from stretto.types import EpisodeLimit


def limit_of(episode: Episode, turns: Turns, max_turns: int) -> EpisodeLimit | None:
    """Returns the limit that an episode with a reward has reached; None: it ended by itself.

    If it has reached several, the one that left the least to the policy counts: seconds, budget, tokens, turns.
    """
    if (limit := limit_of_failure(episode)) is not None:
        return limit
    if turns.is_cut:
        return "tokens"
    return "turns" if max_turns > 1 and len(turns.done) >= max_turns else None


def limit_of_failure(episode: Episode) -> EpisodeLimit | None:
    """Returns the limit that an episode has reached apart from turns and tokens."""
    if episode.cut:
        return "seconds"
    return "budget" if episode.spending.refused else None
