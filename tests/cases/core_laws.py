"""A record of a run apart from the controller's: each command is checked against it, and the laws after each event."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from core_index import check_index

from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.plan import Plan

UNFINISHED = ("running", "between", "waiting")


@dataclass
class Box:
    """An instance as the world sees it."""

    slots: int
    resident: set[int] = field(default_factory=set)
    loading: list[int] = field(default_factory=list)
    leaving: bool = False
    short_of_memory: bool = False


@dataclass
class Piece:
    """A trajectory as the world sees it."""

    group: int
    state: str
    instance: int | None
    under: int  # version it runs under
    slow: bool
    newest: int  # version that it may have tokens of: one that it ran under, or that was about to come
    reward: float | None = None
    generation_failures: int = 0
    scoring_failures: int = 0
    left: int | None = None  # the instance that it was told to leave last


@dataclass
class Odds:
    """The probabilities of what happens in a world."""

    generation_failure: float = 0.0
    scoring_failure: float = 0.0
    loss: float = 0.0
    leave: float = 0.0
    load_sample: float = 0.0
    restore: float = 0.0
    slow: float = 0.0
    turn: float = 0.0  # that a trajectory waits for its world rather than ends
    no_signal: float = 0.0  # groups whose rewards are all equal
    weights: dict[str, float] = field(default_factory=dict)
    losses: int = 3


class Laws:
    """A record of the run apart from the controller's, and the checks of every command and of the state after it."""

    def __init__(self, plan: Plan, boxes: list[int], odds: Odds, seed: int) -> None:
        self.plan, self.odds, self.rng = plan, odds, random.Random(seed)
        self.oldest, self.most_outstanding = plan.staleness, plan.in_flight  # of all plans that the run has had
        self.controller = Controller(plan)
        self.boxes: dict[int, Box] = {}
        self.layout = boxes
        self.next_box = 0
        self.pieces: dict[int, Piece] = {}
        self.groups: dict[int, tuple[int, int]] = {}  # id -> (version, deadline), forever
        self.members: dict[int, tuple[int, ...]] = {}
        self.outstanding: set[int] = set()
        self.ended: dict[int, str] = {}  # trajectory -> how, exactly once
        self.trained_groups = self.dropped_groups = self.replaced_groups = 0
        self.filtered_groups = self.spared_groups = self.filtered_in_a_row = 0
        self.uses: dict[int, int] = {}  # trained group that is not forgotten -> uses
        self.again: tuple[tuple[int, int], ...] = ()  # of the batch in training
        self.replayed_groups = 0
        self.forgotten: set[int] = set()  # trajectories
        self.equal: dict[int, bool] = {}  # group -> whether its rewards are all the same
        self.moves = 0
        self.to_drop: set[int] = set()  # groups that are too old for the next batch
        self.finishing: dict[int, None] = {}  # groups that are finished and in no batch, in the order of finishing
        self.next_update, self.newest = 0, 0
        self.training: tuple[int, tuple[int, ...]] | None = None
        self.training_again = False
        self.rescoring: set[int] = set()  # to be scored again after a restore
        self.updated = 0  # updates done
        self.retired: set[int] = set()
        self.evaluating: tuple[int, int] | None = None
        self.skipped: set[int] = set()
        self.evaluated: set[int] = set()
        self.finished: bool | None = None
        self.stopping = False
        self.events = 0

    def staying(self) -> dict[int, Box]:
        return {id: box for id, box in self.boxes.items() if not box.leaving}

    def is_short_of_memory(self) -> bool:
        """Returns True if every instance on which a group could start is short of memory."""
        able = [
            box
            for box in self.staying().values()
            if box.resident and not (box.loading and max(box.loading) > max(box.resident))
        ]
        return bool(able) and all(box.short_of_memory for box in able)

    # -- commands --------------------------------------------------------------------------------------------------

    def do_loadversion(self, command: m.LoadVersion) -> None:
        box = self.boxes[command.instance]
        assert not self.stopping
        assert not box.leaving
        assert command.version <= self.newest
        assert command.version < self.plan.updates, "nothing runs under the last version"
        assert command.version not in self.retired
        assert command.version not in box.resident
        assert command.version not in box.loading
        box.loading.append(command.version)
        assert len(box.resident) + len(box.loading) <= box.slots

    def do_swapversion(self, command: m.SwapVersion) -> None:
        box = self.boxes[command.instance]
        assert not self.plan.paradigm.pinned
        assert command.version == self.newest > command.old
        assert self.evaluating != (command.instance, command.old)
        box.resident.remove(command.old)
        assert not box.loading
        box.loading.append(command.version)
        for piece in self.pieces.values():
            if piece.instance == command.instance:  # its next token may be of the new version, confirmed or not
                piece.newest = max(piece.newest, command.version)

    def do_unloadversion(self, command: m.UnloadVersion) -> None:
        self.boxes[command.instance].resident.remove(command.version)
        assert self.evaluating != (command.instance, command.version)
        assert not any(
            piece.instance == command.instance and piece.under == command.version for piece in self.pieces.values()
        )

    def do_retire(self, command: m.Retire) -> None:
        version = command.version
        assert version < self.newest
        assert version not in self.retired
        assert not any(version in box.resident or version in box.loading for box in self.boxes.values())
        assert not any(
            piece.state in ("running", "between") and piece.under == version for piece in self.pieces.values()
        )
        if self.plan.paradigm.pinned:
            assert not any(piece.state == "waiting" and piece.under == version for piece in self.pieces.values())
        self.retired.add(version)

    def do_start(self, command: m.Start) -> None:
        size = self.plan.members
        assert not self.stopping
        assert command.group == len(self.groups), "group ids are positions in the stream of prompts"
        assert command.trajectories == tuple(range(command.group * size, (command.group + 1) * size))
        assert len(command.instances) == len(command.trajectories)
        assert all(command.version in self.staying()[each].resident for each in command.instances)
        places = {box for box in command.instances if not self.boxes[box].short_of_memory}
        assert len(set(command.instances)) == 1 or places == set(command.instances), "no memory for another prefix"
        if self.plan.spread == "never":
            assert len(set(command.instances)) == 1
        staleness = command.deadline - command.version
        assert staleness == self.controller.staleness if self.plan.auto else staleness == self.plan.staleness
        assert staleness <= self.plan.staleness
        if self.plan.paradigm.pinned:
            held = {version for box in self.staying().values() for version in (*box.resident, *box.loading)}
            waiting = {piece.under for piece in self.pieces.values() if piece.state == "waiting"}
            assert waiting <= held, "nothing new starts while a version that is waited for has no slot"
        running = sum(piece.state in ("running", "waiting") for piece in self.pieces.values())
        if self.is_short_of_memory():
            running += sum(piece.state == "between" for piece in self.pieces.values())
        assert running < self.plan.rows
        self.groups[command.group] = (command.version, command.deadline)
        self.members[command.group] = command.trajectories
        self.outstanding.add(command.group)
        reserve = self.controller.ledger.reserve.keys()  # `check` bounds it; due groups may be left of a larger plan
        assert command.group in reserve or len(self.outstanding - reserve) <= self.plan.in_flight
        self.equal[command.group] = self.rng.random() < self.odds.no_signal
        for each, instance in zip(command.trajectories, command.instances, strict=True):
            slow = self.rng.random() < self.odds.slow
            version = command.version
            self.pieces[each] = Piece(command.group, "running", instance, version, slow, newest=version)

    def do_resume(self, command: m.Resume) -> None:
        piece = self.pieces[command.trajectory]
        assert not self.stopping
        assert piece.state == "waiting"
        assert command.version in self.staying()[command.instance].resident
        assert bool(command.reason) == (piece.left is not None), "a move says why"
        if self.plan.paradigm.pinned:
            assert command.version == self.groups[piece.group][0], "law 1"
        assert command.version >= piece.newest, "nothing continues under an older version than it has tokens of"
        piece.newest = command.version
        piece.state, piece.instance, piece.under = "running", command.instance, command.version
        piece.left = None

    def do_suspend(self, command: m.Suspend) -> None:
        assert not self.stopping
        assert command.trajectories
        assert command.reason
        for each in command.trajectories:
            piece = self.pieces[each]
            assert piece.state in ("running", "between")
            assert piece.instance == command.instance
            piece.state, piece.instance, piece.left = "waiting", None, command.instance
            self.moves += 1

    def do_releaseinstance(self, command: m.ReleaseInstance) -> None:
        assert self.boxes[command.instance].leaving
        assert any(not box.leaving for box in self.boxes.values()), "somebody stays"
        assert not any(piece.instance == command.instance for piece in self.pieces.values())
        assert self.evaluating is None or self.evaluating[0] != command.instance
        del self.boxes[command.instance]

    def do_keepinstance(self, command: m.KeepInstance) -> None:
        assert self.boxes[command.instance].leaving
        self.boxes[command.instance].leaving = False

    def do_rescore(self, command: m.Rescore) -> None:
        assert not self.stopping
        assert self.pieces[command.trajectory].state == "scoring"
        self.rescoring.discard(command.trajectory)

    def do_fail(self, command: m.Fail) -> None:
        piece = self.pieces[command.trajectory]
        assert piece.state == "failing"
        piece.state = "failed"
        self.end(command.trajectory, "failed")
        ids = self.members[piece.group]
        if all(self.ended.get(each) == "failed" for each in ids):
            self.outstanding.remove(piece.group)
            self.replaced_groups += 1
        else:
            self.note_finished(piece.group)

    def note_finished(self, group: int) -> None:
        """Notes the order in which groups finish: with enough rewards, or with all that they can have."""
        states = [self.pieces[each].state for each in self.members[group] if each in self.pieces]
        scored = states.count("scored")
        if scored == self.plan.group_size or (scored and scored + states.count("failed") == len(states)):
            self.finishing.setdefault(group)

    def do_train(self, command: m.Train) -> None:
        assert not self.stopping
        if self.training_again:
            assert self.training == (command.update, command.trajectories)
            assert self.again == command.again
            self.training_again = False
            return
        assert self.training is None
        assert command.update == self.next_update == self.updated == self.newest
        order = [(self.groups[self.pieces[t].group][0], self.pieces[t].group, t) for t in command.trajectories]
        assert order == sorted(set(order))
        groups = {self.pieces[each].group for each in command.trajectories}
        assert len(groups) == self.plan.batch
        assert groups <= self.outstanding
        if self.oldest == 0 and not self.plan.filter_limit:
            assert groups == set(list(self.finishing)[: self.plan.batch]), "the first to finish win"
        for group in groups:
            del self.finishing[group]
            version, deadline = self.groups[group]
            assert command.update <= deadline, "law 3"
            assert command.update - version <= self.oldest, "law 3"
            alive = [each for each in self.members[group] if each not in self.ended]
            assert alive == [each for each in command.trajectories if self.pieces[each].group == group]
            for each in self.members[group]:
                if each in self.ended:
                    self.pieces.pop(each, None)
            ends = [self.ended.get(each) for each in self.members[group]]
            assert len(alive) == self.plan.group_size or "dropped" not in ends, "what is dropped was not needed"
            assert len(alive) <= self.plan.group_size
        for each in command.trajectories:
            assert self.pieces[each].state == "scored"
            self.pieces[each].state = "training"
        self.outstanding -= groups
        self.check_replay(command)
        self.filtered_in_a_row = 0
        self.training = (command.update, command.trajectories)
        self.next_update += 1
        last = self.plan.redundant and self.next_update == self.plan.updates
        if self.plan.drops:
            self.to_drop = {each for each in self.outstanding if last or self.groups[each][1] <= command.update}
        if self.plan.redundant:
            assert len(self.to_drop) <= self.plan.reserve_groups

    def check_replay(self, command: m.Train) -> None:
        """Later uses are of whole groups that were trained, are young enough and have uses left; none idles."""
        self.again = command.again
        groups = sorted({each // self.plan.members for each, _ in command.again}, key=lambda g: (self.groups[g][0], g))
        expected = [
            (each, self.uses[group])
            for group in groups
            for each in self.members[group]
            if self.ended[each] == "trained"
        ]
        assert list(command.again) == expected
        assert all(self.groups[group][1] >= command.update for group in groups), "law 3"
        assert all(self.uses[group] <= self.plan.replay_uses for group in groups)
        young = [group for group in self.uses if self.groups[group][1] >= command.update]
        assert len(groups) == min(self.plan.replay_groups, len(young))
        self.replayed_groups += len(groups)

    def do_endreuse(self, command: m.EndReuse) -> None:
        assert not self.forgotten & set(command.trajectories), "forgotten once"
        self.forgotten |= set(command.trajectories)
        for group in {each // self.plan.members for each in command.trajectories}:
            uses = self.uses.pop(group)
            assert self.groups[group][1] < self.next_update or uses > self.plan.replay_uses

    def do_filter(self, command: m.Filter) -> None:
        assert self.filtered_in_a_row < self.plan.filter_limit
        self.filtered_in_a_row += 1
        self.filtered_groups += 1
        self.check_no_signal(command.group)
        self.outstanding.remove(command.group)
        alive = [each for each in self.members[command.group] if each not in self.ended]
        assert list(command.trajectories) == alive
        del self.finishing[command.group]
        for each in command.trajectories:
            self.end(each, "filtered")
        for each in self.members[command.group]:
            self.pieces.pop(each, None)

    def do_sparefromfilter(self, command: m.SpareFromFilter) -> None:
        assert self.filtered_in_a_row == self.plan.filter_limit > 0
        assert command.update == self.next_update
        self.spared_groups += 1
        self.check_no_signal(command.group)

    def check_no_signal(self, group: int) -> None:
        pieces = [self.pieces[each] for each in self.members[group] if self.ended.get(each) != "dropped"]
        assert all(piece.state in ("scored", "failed") for piece in pieces)
        assert len({piece.reward for piece in pieces if piece.state == "scored"}) == 1

    def do_drop(self, command: m.Drop) -> None:
        assert self.plan.drops
        assert command.reason
        alive = [each for each in self.members[command.group] if each not in self.ended]
        if command.surplus:
            scored = [each for each in alive if self.pieces[each].state == "scored"]
            assert len(scored) == self.plan.group_size < self.plan.members
            alive = [each for each in alive if each not in scored]
            assert alive
        else:
            draining = self.plan.paradigm.on_publish == "drain" and self.updated > self.newest
            running = any(self.pieces[each].state in UNFINISHED for each in alive)
            assert command.group in self.to_drop or (self.plan.redundant and draining and running)
            self.to_drop.discard(command.group)
            self.outstanding.remove(command.group)
            self.finishing.pop(command.group, None)
            self.dropped_groups += 1
        assert list(command.trajectories) == alive
        for each in alive if command.surplus else self.members[command.group]:
            self.pieces.pop(each, None)
            self.rescoring.discard(each)
        for each in command.trajectories:
            self.end(each, "dropped")

    def do_publish(self, command: m.Publish) -> None:
        assert command.version == self.newest + 1 == self.updated
        self.newest = command.version
        if self.plan.paradigm.on_publish == "drain" and not self.stopping:
            assert not any(piece.state in UNFINISHED for piece in self.pieces.values())

    def do_evaluate(self, command: m.Evaluate) -> None:
        assert self.evaluating is None
        assert command.version in self.boxes[command.instance].resident
        assert command.version % self.plan.evaluate_every == 0
        assert 0 < command.version < self.plan.updates
        assert command.version not in self.evaluated
        self.evaluated.add(command.version)
        self.evaluating = (command.instance, command.version)

    def do_skipevaluation(self, command: m.SkipEvaluation) -> None:
        assert command.version % self.plan.evaluate_every == 0
        assert command.version not in self.skipped, "it is skipped once"
        self.skipped.add(command.version)

    def do_finish(self, command: m.Finish) -> None:
        self.finished = command.stopped

    # -- laws ------------------------------------------------------------------------------------------------------

    def end(self, trajectory: int, how: str) -> None:
        assert trajectory not in self.ended, "law 2: a trajectory ends once"
        self.ended[trajectory] = how

    def check(self) -> None:
        assert not self.to_drop, "exactly those past their limit are dropped"
        reserve = self.controller.ledger.reserve.keys()
        assert reserve <= self.outstanding
        assert len(reserve) <= self.plan.reserve_groups
        assert all(self.groups[each][1] >= self.next_update for each in self.outstanding), (
            "no deadline lies in the past"
        )
        deadlines = sorted(self.groups[each][1] for each in self.outstanding - reserve)
        if self.plan.paradigm.bounded_by == "deadlines":
            for count, deadline in enumerate(deadlines, 1):
                assert count <= self.plan.batch * (deadline - self.next_update + 1), "the deadline invariant"
        assert len(deadlines) <= self.most_outstanding
        assert self.finishing.keys() == self.controller.ledger.finished.keys() or self.rescoring or self.stopping
        net = len(self.groups) - self.replaced_groups - self.dropped_groups - self.filtered_groups
        assert net <= self.plan.updates * self.plan.batch + self.plan.reserve_groups
        if self.plan.paradigm.staleness == 0 and self.training and not self.training_again:
            assert not any(piece.state in UNFINISHED for piece in self.pieces.values())
        if not self.stopping and self.boxes and self.plan.paradigm.pinned:
            self.check_places()
        elif not self.stopping:
            held = max((version for box in self.staying().values() for version in box.resident), default=-1)
            waiting = [piece.newest for piece in self.pieces.values() if piece.state == "waiting"]
            assert all(version > held for version in waiting), (
                "a trajectory that can continue without going back does not wait"
            )
        self.check_rows()
        assert self.controller.newest == self.newest
        assert self.controller.next_update == self.next_update
        if self.finished is None and self.events % 7 == 0:
            assert all(wait.reason for wait in self.controller.waits())
            check_index(
                self.controller.instances,
                pinned=self.plan.paradigm.pinned,
                target=self.controller.most_running,
                oldest=self.newest - self.controller.staleness // 2,
                refused=self.newest - 1,
            )

    def check_rows(self) -> None:
        """A trajectory takes a row if it wants tokens; between turns it keeps its instance, and moves to no other."""
        states = [piece.state for piece in self.pieces.values()]
        ledger = self.controller.ledger
        assert ledger.num_active == states.count("running") + states.count("waiting")
        assert ledger.num_between_turns == states.count("between")
        for id, instance in self.controller.instances.items():
            here = {each: piece.state for each, piece in self.pieces.items() if piece.instance == id}
            assert instance.trajectories.keys() == here.keys()
            assert instance.load == sum(state == "running" for state in here.values())
            assert instance.between_turns == {each for each, state in here.items() if state == "between"}
            movable = [each.version for each in instance.trajectories.values() if each.movable]
            assert {version: movable.count(version) for version in movable} == instance.movable
            assert not any(ledger.trajectories[each].movable for each in instance.between_turns)

    def check_places(self) -> None:
        """A waiting trajectory has its version on no instance, and the versions in the slots are due before it."""
        staying = self.staying()
        due: dict[int, int] = {}
        for piece in self.pieces.values():
            if piece.state in UNFINISHED:
                version, deadline = self.groups[piece.group]
                due[version] = min(deadline, due.get(version, deadline))
        waiting = {piece.under for piece in self.pieces.values() if piece.state == "waiting"}
        for version in waiting:
            assert not any(version in box.resident for box in staying.values())
            if self.plan.auto or any(version in box.loading for box in staying.values()):
                continue
            for id, box in staying.items():
                assert len(box.resident) + len(box.loading) == box.slots, "a free slot is for what waits"
                for held in box.resident:
                    serves = any(piece.instance == id and piece.under == held for piece in self.pieces.values())
                    assert self.evaluating == (id, held) or (serves and due[held] <= due[version])

    def check_end(self) -> None:
        counters = self.controller.counters
        ends = list(self.ended.values())
        assert counters.trained == ends.count("trained")
        assert counters.failed == ends.count("failed")
        assert counters.dropped == ends.count("dropped")
        assert (counters.replaced_groups, counters.dropped_groups) == (self.replaced_groups, self.dropped_groups)
        assert counters.admitted_groups == len(self.groups)
        assert counters.filtered == ends.count("filtered")
        assert (counters.filtered_groups, counters.spared_groups) == (self.filtered_groups, self.spared_groups)
        assert counters.replayed_groups == self.replayed_groups
        assert self.controller.reuse.kept.keys() == self.uses.keys(), "what is not forgotten is kept"
        if self.finished:
            return
        assert self.updated == self.newest == self.plan.updates
        assert self.trained_groups == counters.trained_groups == self.plan.updates * self.plan.batch
        assert not self.outstanding
        assert self.ended.keys() == {each for ids in self.members.values() for each in ids}, "law 2: nothing vanishes"
        assert not self.controller.ledger.trajectories, "what has ended is forgotten"
        assert self.stopping or set(range(self.newest)) - self.retired <= {
            v for box in self.boxes.values() for v in box.loading
        }
        assert self.stopping or self.evaluating is None
        if self.plan.evaluate_every:
            due = len(range(0, self.plan.updates, self.plan.evaluate_every)) - 1  # the first is evaluated outside
            assert counters.evaluations + counters.evaluations_skipped == due
            assert len(self.skipped) == counters.evaluations_skipped
