"""Rollouts from their admission to their reward, over the instances that live.

Nothing is decided here: what happens to a trajectory, or to an instance under it, is posted to the core as an event.

A rollout runs its episode on one instance at a time (`Placement`). If the core moves it, it leaves the instance at once
(`run/suspensions.py`), and its episode is run again on the next one. There the turns that are done are handed back to
the environment, and the unfinished turn continues: with its KV if carrying that is cheaper than prefilling again
(`core/migration.py`), else without; from the context of the turn if the instance that it left was lost. Version and
seed stay, so the tokens are the same in every case.

An episode may take several turns, each with a request for it. To the core it is one trajectory that is on its instance
from its first turn to its last, whether the engine or the environment is at work. If the environment takes longer than
`WORLD_S`, the core hears of that, and again when the next turn is asked for: in between its row is free for others. If
an episode fails before its last turn, an attempt to generate has failed; the turns that are done are kept. A trajectory
has its last token when its turns or the tokens of its lineages are used up, or when its episode returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from stretto import clock
from stretto.core import messages as core
from stretto.environments.function_specs import last_line
from stretto.environments.protocol import Earned, earned, other_tokens
from stretto.environments.single_turn import Decode
from stretto.errors import (
    AbortedError,
    EngineError,
    RequestError,
    RewardError,
    ScoringHaltedError,
    StrettoError,
    SuspendedError,
    TransitionError,
    VersionNotResidentError,
)
from stretto.observe.metrics import Tally
from stretto.observe.tail_latency import Tail
from stretto.run.episode_limits import limit_of, limit_of_failure
from stretto.run.episodes import Episode
from stretto.run.first_reward import FirstReward
from stretto.run.instance_membership import Instances
from stretto.run.load_sampler import LoadSampler
from stretto.run.output_checks import refuse_output
from stretto.run.quarantine import Quarantine
from stretto.run.rollout import PendingTurn, Placement, Rollout, RolloutState
from stretto.run.seeds import turn_seed
from stretto.run.settings import Settings
from stretto.run.suspensions import Suspensions, all_done
from stretto.run.task_play import Tasks, longest_completion, play_of
from stretto.run.version_loader import VersionLoader
from stretto.store.journal import Journal
from stretto.types import Completion, EpisodeLimit, Request, Suspended

log = logging.getLogger(__name__)

WORLD_S = 0.02  # about one decode step: a row that is wanted back sooner is of no use to another trajectory


@dataclass(slots=True, eq=False)
class _EpisodeRun:
    """One run of a rollout's episode: on a placement, or on none to score what has its last token."""

    rollout: Rollout
    placement: Placement | None
    completed: bool = False  # the rollout had its last token in this run
    episode: Episode | None = None  # once it is played
    row_timer: asyncio.TimerHandle | None = None  # frees its row, while its environment works

    @property
    def outdated(self) -> bool:
        """True if the rollout has left this placement, or has ended."""
        if self.rollout.state is RolloutState.ENDED:
            return True
        return self.placement is not None and self.rollout.placement is not self.placement

    @property
    def counts(self) -> bool:
        """True if the rollout gets what this run of its episode returns."""
        return not self.outdated or (self.completed and self.rollout.state is not RolloutState.ENDED)


class Rollouts:
    """All rollouts in progress, and the requests for them. For the loop's thread only."""

    def __init__(
        self,
        in_progress: Mapping[int, Rollout],
        *,
        instances: Instances,
        version_loader: VersionLoader,
        tasks: Tasks,
        decode: Decode,
        settings: Settings,
        pinned: bool,
        journal: Journal,
        tally: Tally,
        tail: Tail,
        first_reward: FirstReward,
        post: Callable[[core.Event], None],
        halt: Callable[[ScoringHaltedError], None],
    ) -> None:
        """`tasks`: how episodes are played. `pinned`: a trajectory keeps its version for life.

        `halt` is called if scoring cannot go on.
        """
        self.in_progress: dict[int, Rollout] = dict(in_progress)
        self.instances = instances
        self.failed_in_a_row = 0  # trajectories that failed for good since the last reward
        self._version_loader = version_loader
        self._play_of = play_of(tasks)
        self._decode = decode
        self._journal = journal
        self._tally = tally
        self._tail = tail
        self._first_reward = first_reward
        self._post = post
        self._halt = halt
        self._pinned = pinned
        self._check = partial(
            refuse_output, checksums=version_loader.checksums, vocabulary=settings.vocabulary, continued=not pinned
        )
        self._load_sampler = LoadSampler(self.in_progress, instances, longest_completion(tasks))
        self.suspensions = Suspensions(
            self.in_progress,
            instances=instances,
            load_sampler=self._load_sampler,
            journal=journal,
            tally=tally,
            check=self._check,
            pinned=pinned,
        )
        self._episodes: set[Episode] = set()  # those that are played now
        self._quarantine = Quarantine(self.in_progress, post)
        instances.on_loss = self._instance_lost

    def remove(self, id: int) -> Rollout:
        """Ends a rollout and returns it: it is trained, or is not going to be."""
        rollout = self.in_progress.pop(id)
        rollout.end()
        return rollout

    @property
    def environment_works(self) -> bool:
        """True while an environment does anything but wait for tokens; that has a deadline of its own."""
        return any(episode.environment_works for episode in self._episodes)

    def sample_load(self) -> core.LoadSampled:
        """Returns how far the rollouts are, and which instances are short of KV memory."""
        sample = self._load_sampler.sample()
        self._quarantine.note_progress(sample.tokens)
        return sample

    def note_failure(self, rollout: Rollout) -> None:
        """Counts a rollout that failed for good."""
        self.failed_in_a_row += 1
        self._quarantine.note_failure(rollout)

    # -- an episode ----------------------------------------------------------------------------------------------------

    def launch(
        self, rollout: Rollout, version: int, instance: int, *, resumed: bool = False, reason: str = ""
    ) -> Coroutine[Any, Any, None]:
        """Places a rollout on an instance; the coroutine that is returned runs its episode there."""
        placement = Placement(instance, version, resumed, reason)
        rollout.place(placement)
        if instance not in self.instances.engines:  # it was lost, and the core has not heard of that yet
            rollout.interrupt()
        return self._play(_EpisodeRun(rollout, placement))

    def score(self, rollout: Rollout) -> Coroutine[Any, Any, None]:
        """Scores a rollout that has its last token."""
        return self._play(_EpisodeRun(rollout, None))

    async def _play(self, run: _EpisodeRun) -> None:
        """Runs an episode to its reward. Whatever goes wrong with this trajectory alone becomes an event."""
        rollout, placement = run.rollout, run.placement
        await all_done(rollout.departures)
        if placement is not None and placement.resumed:
            await self._journal.room()  # thousands may be resumed at once
            if not run.outdated:
                where, why = placement.instance, placement.reason
                self._journal.state_changed(rollout.id, "running", at=clock.now(), reason=why, instance=where)
        if run.outdated:
            return
        play = self._play_of(rollout.prompt.task)
        episode = Episode(
            rollout.turns, partial(self._turn, run),
            max_tokens=play.sampling.max_tokens, max_context=play.max_context, deadline_s=play.episode_s,
            seconds=play.cut_s, budget=play.budget,
        )  # fmt: skip
        self._episodes.add(episode)
        run.episode = episode
        self._world_works(run)
        try:
            outcome = await episode.play(play.environment, rollout.prompt)
            reward, turn_rewards, parts = self._earned(run, outcome, episode.num_asked)
        except (SuspendedError, AbortedError, EngineError) as error:
            self._interrupted(run, error)
            return
        except ScoringHaltedError as error:
            self._halt(error)  # it stays to be scored
            return
        except Exception as error:
            ours = isinstance(error, StrettoError) and not isinstance(error, RewardError | RequestError)
            if ours or (isinstance(error, AssertionError) and error is episode.fault):
                raise  # not of this trajectory: of the journal, of the reward pool itself, of this package
            if run.counts:
                self._note_limit(rollout, limit_of_failure(episode), episode.spending.spent)
            self._failed(run, error)
            return
        finally:
            self._episodes.discard(episode)
            _cancel_timer(run)
        if not run.counts:
            return  # dropped while it was scored, or its episode is run again elsewhere
        if not rollout.is_generated:
            self._complete(run)
        self._note_limit(rollout, limit_of(episode, rollout.turns, play.max_turns), episode.spending.spent)
        rollout.score(reward, turn_rewards, parts)
        self.failed_in_a_row = 0
        self._first_reward.scored()
        self._tail.member_ended(rollout.group, scored=True)
        self._journal.scored(rollout.id, reward, at=clock.now(), turns=turn_rewards, parts=parts)
        self._post(core.Scored(rollout.id, reward))

    def _note_limit(self, rollout: Rollout, limit: EpisodeLimit | None, spent: float) -> None:
        """Records the limit that an episode has reached, and what it has spent, instead of what an earlier try had."""
        if self._play_of(rollout.prompt.task).is_single_turn:
            return
        self._journal.episode_limited(rollout.id, limit, spent)
        if limit is not None or spent:
            self._tally.episode_limited(limit, spent)

    def _earned(self, run: _EpisodeRun, outcome: object, num_turns: int) -> Earned:
        """Returns what an episode has earned. Raises `RewardError` if it returned anything else."""
        rollout = run.rollout
        if run.counts and 0 < num_turns < (had := len(rollout.turns.done)):
            if not self._play_of(rollout.prompt.task).may_differ or rollout.is_generated:
                raise RewardError(
                    f"the environment returned after {num_turns} turns, and had asked for {had} the first time: an "
                    "episode that is run again must ask for the same"
                )
            self._take_another_course(rollout, num_turns)
        if num_turns and not any(turn.train for turn in rollout.turns.done):
            raise RewardError(
                "the environment opened every lineage of its episode with `train=False`: leave that out for those that "
                "the policy is to learn from"
            )
        return earned(outcome, num_turns)

    def _interrupted(self, run: _EpisodeRun, error: SuspendedError | AbortedError | EngineError) -> None:
        """A turn was not generated, for a reason that is not of this trajectory."""
        instance = None if run.placement is None else run.placement.instance
        if isinstance(error, EngineError):
            assert instance is not None, "a rollout that has its last token asks no engine"
            self.instances.lose(instance, error)
        elif instance in self.instances.engines and not run.outdated:  # else it was suspended, or ended
            text = f"it handed trajectory {run.rollout.id} back, which nobody asked for: {error}"
            self.instances.lose(instance, EngineError(text))

    def _failed(self, run: _EpisodeRun, error: Exception) -> None:
        """An attempt to generate or to score failed. Raises `StalledError` if no attempt ever succeeds."""
        rollout = run.rollout
        reason = str(error) if isinstance(error, StrettoError) else last_line(error)
        if rollout.state is RolloutState.ENDED:
            return
        instance = None if run.placement is None else run.placement.instance
        if not run.counts:
            text = "trajectory %d failed as it left instance %s, and continues elsewhere: %s"
            log.info(text, rollout.id, instance, reason)
            return
        self._first_reward.failed(rollout.id, rollout.group, error, rollout.prompt.task)
        if rollout.is_generated:
            self._post(core.ScoringFailed(rollout.id, reason))
        else:
            rollout.interrupt()
            rollout.suspended = None
            self._post(core.GenerationFailed(rollout.id, reason, instance))

    def _instance_lost(self, instance: int, error: EngineError) -> None:
        """Takes a lost instance away from the rollouts on it. One of those that it generated for may be the cause."""
        here = [rollout for rollout in self.in_progress.values() if rollout.instance == instance]
        load = self.instances.report_of(instance)
        contexts = {
            rollout.id: self._load_sampler.context(rollout, placement, load)
            for rollout in here
            if (placement := rollout.placement) is not None and placement.pending is not None
        }
        for rollout in here:
            rollout.interrupt()
        self._quarantine.note_loss(instance, error, contexts)

    # -- a turn --------------------------------------------------------------------------------------------------------

    async def _turn(
        self, run: _EpisodeRun, number: int, tokens: tuple[int, ...], lineage: int, train: bool
    ) -> Completion:
        """Returns turn `number` of an episode: the one that is done, or a new one of the rollout's instance."""
        rollout, placement = run.rollout, run.placement
        if not run.counts:
            raise AbortedError(f"trajectory {rollout.id} continues elsewhere, or has ended")
        if (done := rollout.turns.get(number, tokens, lineage, train)) is not None:
            return done
        play = self._play_of(rollout.prompt.task)
        room = rollout.turns.room(
            number, tokens, lineage, train, max_turns=play.max_turns, max_tokens=play.sampling.max_tokens,
            max_lineages=play.max_lineages, max_context=play.max_context,
        )  # fmt: skip
        if number < len(rollout.turns.done):
            self._take_another_course(rollout, number)
        if placement is None or rollout.is_generated:
            raise RewardError(
                f"the environment asked for turn {number}, and its episode had ended before: an episode that is run "
                "again must ask for the same"
            )
        instance = placement.instance
        self._wants_tokens(run)
        async with self._quarantine.generating(rollout):
            if number:
                await self._version_loader.swapped(instance)  # only then is it known which version the instance holds
            if run.outdated or instance not in self.instances.engines:
                raise AbortedError(f"trajectory {rollout.id} has no instance any more")
            work = self._work(rollout, placement, tokens, room)
            request = work.request if isinstance(work, Suspended) else work
            pending = self._ask(rollout, placement, work)
            try:
                completion = await self.instances.call(
                    instance,
                    lambda engine: engine.resume(work) if isinstance(work, Suspended) else engine.generate(work),
                )
            except VersionNotResidentError as error:
                if not self._pinned:
                    raise
                lost = EngineError(f"it had confirmed version {request.version}, and says now: {error}")
                self.instances.lose(instance, lost)
                raise lost from error
            except EngineError as error:
                self.instances.lose(instance, error)  # here, as the quarantine is still on this rollout
                raise
            finally:
                pending.answered.set_result(None)
            return self._answered(run, placement, request, completion, lineage, train)

    def _work(self, rollout: Rollout, placement: Placement, tokens: tuple[int, ...], room: int) -> Request | Suspended:
        """Returns a request for the next turn, or the turn that was suspended before its end.

        Raises `TransitionError` if the version is older than the newest that the rollout has tokens of.
        """
        instance, version, number = placement.instance, placement.version, len(rollout.turns.done)
        if number and not self._pinned:  # between two turns the instance may have got newer weights
            version = max(version, self._version_loader.newest.get(instance, version))
        newest = rollout.newest_version
        if newest is not None and version < newest:  # the core does not let this happen
            raise TransitionError(
                f"trajectory {rollout.id} has tokens of version {newest} and was to go on under version {version} on "
                f"instance {instance}, which is older"
            )
        if rollout.suspended is not None:  # its request may be of a session with other options
            if rollout.suspended.request.prompt == tokens:
                return _under(rollout.suspended, version)
            self._take_another_course(rollout, number)
        play = self._play_of(rollout.prompt.task)
        sampling = play.sampling if room == play.sampling.max_tokens else replace(play.sampling, max_tokens=room)
        seed = turn_seed(rollout.seed, number)
        keep = number + 1 < play.max_turns
        return Request(rollout.id, version, tokens, seed, sampling, group=rollout.group, keep=keep)

    def _take_another_course(self, rollout: Rollout, number: int) -> None:
        """Forgets the turns from `number` on of an episode that is run again and asks for something else there.

        Raises `RewardError` if its environment is deterministic, or if it has its last token, which is recorded.
        """
        if not self._play_of(rollout.prompt.task).may_differ or rollout.is_generated:
            raise other_tokens(number)
        text = "trajectory %d was run again and asked for something else at turn %d: %d tokens are discarded"
        before = rollout.num_sampled
        rollout.discard_turns(number)
        log.info(text, rollout.id, number, before - rollout.num_sampled)

    def _ask(self, rollout: Rollout, placement: Placement, work: Request | Suspended) -> PendingTurn:
        """Notes that an instance is asked for a turn, and counts the move if the rollout was on another one before."""
        suspended = work if isinstance(work, Suspended) else None
        request = work.request if isinstance(work, Suspended) else work
        context = len(request.prompt) + (0 if suspended is None else len(suspended.tokens))
        if suspended is not None or rollout.source not in (None, placement.instance):
            self._count_move(rollout, placement, suspended, context)
        if suspended is not None:  # if this instance is lost too, the turn continues from these tokens, prefilled again
            rollout.suspended = replace(suspended, kv=None)
        steps = self.instances.engines[placement.instance].report().steps
        return rollout.ask(request, context=context, engine_steps=steps)

    def _count_move(self, rollout: Rollout, placement: Placement, suspended: Suspended | None, context: int) -> None:
        """Records that a rollout continues elsewhere: with so many bytes of KV, or so many tokens prefilled again."""
        kv = None if suspended is None else suspended.kv
        num_bytes = 0 if kv is None else kv.nbytes
        prefilled = context if kv is None else 0
        self._tally.moved(num_bytes, prefilled)
        self._journal.trajectory_moved(
            rollout.id,
            version=placement.version,
            source=rollout.source,
            target=placement.instance,
            context=context,
            num_bytes=num_bytes,
            prefilled=prefilled,
            reason=placement.reason,
            at=clock.now(),
        )
        rollout.source = None

    def _answered(
        self,
        run: _EpisodeRun,
        placement: Placement,
        request: Request,
        completion: Completion,
        lineage: int,
        train: bool,
    ) -> Completion:
        """Adds a turn to the rollout; if no other can follow, the rollout has its last token.

        Raises `EngineError`, and the instance is lost, if the answer cannot be that to the request.
        """
        rollout = run.rollout
        try:
            self._check(completion, request)
        except EngineError as error:
            rollout.suspended = None  # it may be the cause: the turn begins again
            self.instances.lose(placement.instance, error)
            raise
        if completion.version != rollout.version and completion.token_versions is None:
            # `partial` began it under newer weights than it was admitted with: all of its tokens are of that version.
            versions = np.full(len(completion.tokens), completion.version, dtype=np.int32)
            completion = replace(completion, token_versions=versions)
        rollout.end_turn(placement, request.prompt, completion, lineage, train)
        if rollout.state is RolloutState.ENDED:
            raise AbortedError(f"trajectory {rollout.id} was dropped as it ended")
        play = self._play_of(rollout.prompt.task)
        if rollout.turns.is_full(max_turns=play.max_turns, max_lineages=play.max_lineages):
            self._complete(run)
        elif run.outdated:
            raise AbortedError(f"trajectory {rollout.id} continues elsewhere")
        else:
            self._world_works(run)
        return completion

    # -- its row -------------------------------------------------------------------------------------------------------

    def _world_works(self, run: _EpisodeRun) -> None:
        """Frees the row of a rollout if its environment takes long, before its first turn or after one."""
        max_turns = self._play_of(run.rollout.prompt.task).max_turns
        if max_turns > 1 and run.placement is not None and not run.rollout.is_generated:
            _cancel_timer(run)
            run.row_timer = asyncio.get_running_loop().call_later(WORLD_S, self._free_row, run)

    def _free_row(self, run: _EpisodeRun) -> None:
        run.row_timer = None
        if run.episode is None or run.outdated or run.rollout.is_generated:
            return
        if not run.episode.environment_works:  # it is just being handed a turn that was done before
            self._world_works(run)
            return
        run.rollout.frees_row = True
        self._post(core.TurnEnded(run.rollout.id))

    def _wants_tokens(self, run: _EpisodeRun) -> None:
        """Takes the row of a rollout again, if it was free."""
        _cancel_timer(run)
        if run.rollout.frees_row:
            run.rollout.frees_row = False
            self._post(core.TurnAsked(run.rollout.id))

    def _complete(self, run: _EpisodeRun) -> None:
        """A rollout has its last token."""
        id, lineages, prompt = run.rollout.id, run.rollout.complete(), run.rollout.prompt.tokens
        run.completed = True
        texts = [self._decode(lineage.completion.tokens.tolist()) for lineage in lineages]
        contexts = [None if each.context == prompt else self._decode(each.context) for each in lineages]
        self._journal.generated(id, lineages, texts, at=clock.now(), contexts=contexts)
        self._post(core.Generated(id, run.rollout.num_sampled))


def _cancel_timer(run: _EpisodeRun) -> None:
    if run.row_timer is not None:
        run.row_timer.cancel()
        run.row_timer = None


def _under(suspended: Suspended, version: int) -> Suspended:
    """Returns a suspended turn that is to continue under `version`: its own, or under `partial` perhaps a newer one."""
    if suspended.request.version == version:
        return suspended
    versions = suspended.token_versions
    if versions is None:
        versions = np.full(len(suspended.tokens), suspended.request.version, dtype=np.int32)
    return replace(suspended, request=replace(suspended.request, version=version), token_versions=versions, kv=None)
