"""A world around the controller, in which everything that can happen happens at random."""

from __future__ import annotations

from dataclasses import replace

from core_laws import Box, Laws
from core_record import record

from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.plan import Plan
from stretto.core.spreading import GroupCosts


class World(Laws):
    """Carries commands out at random times and in random order."""

    # -- events ----------------------------------------------------------------------------------------------------

    def send(self, event: m.Event) -> list[m.Command]:
        self.events += 1
        assert self.events < 100_000, "the run does not end"
        commands = self.controller.handle(event)
        for command in commands:
            assert self.finished is None, f"{command} after Finish"
            getattr(self, "do_" + type(command).__name__.lower())(command)
        self.check()
        return commands

    def join(self, slots: int) -> None:
        box = self.next_box
        self.next_box += 1
        self.boxes[box] = Box(slots)
        self.send(m.Joined(box, slots))
        assert self.stopping or not self.rescoring, "what was being scored is scored again when an instance joins"
        assert self.stopping or not self.training_again, "what was being trained on is trained on again"

    def run(self, stop_after: int | None = None) -> None:
        for slots in self.layout:
            self.join(slots)
        while self.finished is None:
            if stop_after is not None and self.events >= stop_after and not self.stopping:
                self.stopping = True
                self.send(m.StopRequested())
                assert self.finished is not None or self.training is not None
                continue
            self.step()
        self.check_end()

    def step(self) -> None:
        rng, odds = self.rng, self.odds
        if not self.boxes:
            self.join(rng.choice(self.layout))
            return
        if odds.losses and rng.random() < odds.loss:
            odds.losses -= 1
            self.lose(rng.choice(list(self.boxes)))
            return
        if odds.losses and rng.random() < odds.leave:
            odds.losses -= 1
            self.leave(rng.choice(list(self.boxes)))
            return
        if rng.random() < odds.load_sample:
            self.sample_load()
            return
        if odds.turn and rng.random() < 0.05:
            self.report_again()
            return
        if self.plan.auto and rng.random() < 0.1:
            self.send(m.Measured(rng.uniform(0, 20), rng.uniform(0, 4)))
            return
        if rng.random() < 0.02 and len(self.staying()) < len(self.layout):
            self.join(rng.choice(self.layout))
            return
        if odds.losses and rng.random() < odds.restore:
            odds.losses -= 1
            self.restore()
            return
        if (
            self.plan.drops
            and rng.random() < 0.02
            and (gone := [t for t, how in self.ended.items() if how == "dropped"])
        ):
            late = rng.choice(gone)  # a report that was on its way when it was dropped
            reports = (m.Generated(late, 10), m.Scored(late, 1.0), m.TurnEnded(late), m.ScoringFailed(late, "late"))
            assert self.send(rng.choice(reports)) == []
            return
        actions = self.possible()
        if not actions and len(self.staying()) < len(self.layout):
            self.join(rng.choice(self.layout))
            return
        assert actions, f"deadlock: {self.controller.waits()}"
        names = list(actions)
        name = rng.choices(names, [odds.weights.get(each, 1.0) for each in names])[0]
        getattr(self, name)(actions[name])

    def possible(self) -> dict[str, list]:
        """Returns the work in progress. Slow trajectories end if nothing else can happen, or now and then."""
        actions = {
            "load": [box for box, each in self.boxes.items() if each.loading],
            "generate": [t for t, each in self.pieces.items() if each.state in ("running", "between")],
            "ask_turn": [t for t, each in self.pieces.items() if each.state == "between"],
            "score": [t for t, each in self.pieces.items() if each.state == "scoring" and t not in self.rescoring],
            "update": [self.training[0]] if self.training and not self.training_again else [],
            "evaluate": [self.evaluating[1]] if self.evaluating else [],
            "end_before": [t for t, each in self.pieces.items() if each.state == "waiting" and each.left is not None],
        }
        if self.rng.random() > 0.02:
            actions["end_before"] = []  # never all that is in progress
        fast = [t for t in actions["generate"] if not self.pieces[t].slow]
        if (
            fast or any(actions[each] for each in ("load", "score", "update", "ask_turn"))
        ) and self.rng.random() > 0.02:
            actions["generate"] = fast
        return {name: each for name, each in actions.items() if each}

    def load(self, boxes: list[int]) -> None:
        box = self.rng.choice(boxes)
        version = self.boxes[box].loading.pop(0)
        self.boxes[box].resident.add(version)
        if not self.plan.paradigm.pinned:
            for piece in self.pieces.values():
                if piece.instance == box:
                    piece.under = version
        self.send(m.Loaded(box, version))

    def generate(self, ids: list[int]) -> None:
        trajectory = self.rng.choice(ids)
        piece = self.pieces[trajectory]
        if piece.state == "running" and self.rng.random() < self.odds.turn:
            piece.state = "between"
            self.send(m.TurnEnded(trajectory))
            return
        piece.instance = None
        if self.rng.random() < self.odds.generation_failure:
            piece.generation_failures += 1
            piece.state = "waiting" if piece.generation_failures <= self.plan.retries else "failing"
            self.send(m.GenerationFailed(trajectory, "cut off"))
            assert piece.state != "failing"
        else:
            piece.state = "scoring"
            self.send(m.Generated(trajectory, 10))

    def ask_turn(self, ids: list[int]) -> None:
        trajectory = self.rng.choice(ids)
        self.pieces[trajectory].state = "running"
        self.send(m.TurnAsked(trajectory))

    def report_again(self) -> None:
        """A report of a turn that says what is known, or that comes after the end of generation, changes nothing."""
        known = {"running": [m.TurnAsked], "between": [m.TurnEnded], "waiting": [m.TurnEnded, m.TurnAsked]}
        known |= {state: [m.TurnEnded, m.TurnAsked] for state in ("scoring", "scored")}
        pieces = [id for id, piece in self.pieces.items() if piece.state in known]
        if self.plan.paradigm.at_limit == "drop":
            pieces += [id for id, how in self.ended.items() if how == "dropped"]
        if pieces:
            id = self.rng.choice(pieces)
            state = self.pieces[id].state if id in self.pieces else "scored"
            before = record(self.controller)
            assert self.send(self.rng.choice(known[state])(id)) == []
            assert record(self.controller) == before

    def end_before(self, ids: list[int]) -> None:
        """A trajectory that waits for a place had ended, or failed, before it was suspended."""
        trajectory = self.rng.choice(ids)
        piece = self.pieces[trajectory]
        if self.rng.random() < 0.3:
            assert self.send(m.GenerationFailed(trajectory, "cut off", piece.left)) == []
        elif self.rng.random() < 0.5:  # a turn ended there, or was asked for; it is not known yet that it left
            assert self.send(self.rng.choice([m.TurnEnded, m.TurnAsked])(trajectory)) == []
        else:
            piece.state = "scoring"
            self.send(m.Generated(trajectory, 10))

    def leave(self, box: int) -> None:
        self.boxes[box].leaving = True
        self.send(m.Leaving(box))

    def sample_load(self) -> None:
        """If nothing changes in between, load samples soon move nothing."""
        running = [t for t, each in self.pieces.items() if each.state in ("running", "between")]
        tokens = {each: self.rng.choice([3, 40, 1000]) for each in running if self.rng.random() < 0.9}
        ending = frozenset(each for each in running if self.rng.random() < 0.1)
        short_of_memory = frozenset(box for box in self.boxes if self.rng.random() < 0.1)
        for id, box in self.boxes.items():
            box.short_of_memory = id in short_of_memory
        costs = self.rng.choice([None, GroupCosts(0.1, 0.0), GroupCosts(0.1, 0.01), GroupCosts(0.0, 0.01)])
        self.send(m.LoadSampled(tokens, short_of_memory, ending, costs))
        if self.rng.random() < 0.3:
            return  # memory stays short for a while
        for box in self.boxes.values():
            box.short_of_memory = False
        for _ in range(12):
            moves = self.moves
            commands = self.send(m.LoadSampled(tokens, frozenset(), ending))
            if not commands:
                break
        assert self.moves == moves or any(box.loading for box in self.boxes.values()), (
            "load samples move work to and fro"
        )

    def score(self, ids: list[int]) -> None:
        trajectory = self.rng.choice(ids)
        piece = self.pieces[trajectory]
        if self.rng.random() < self.odds.scoring_failure:
            piece.scoring_failures += 1
            last = piece.scoring_failures > self.plan.retries
            piece.state = "failing" if last else "scoring"
            commands = self.send(m.ScoringFailed(trajectory, "no number"))
            expected = m.Fail(trajectory, "no number") if last else m.Rescore(trajectory)
            assert (expected in commands) or (self.stopping and not last)
        else:
            piece.state = "scored"
            piece.reward = 0.0 if self.equal[piece.group] else float(trajectory % 2)
            self.note_finished(piece.group)
            self.send(m.Scored(trajectory, piece.reward))

    def update(self, updates: list[int]) -> None:
        assert self.training is not None
        update, ids = self.training
        self.training = None
        for each in ids:
            self.end(each, "trained")
        groups = {self.pieces[each].group for each in ids}
        self.trained_groups += len(groups)
        for group in {each // self.plan.members for each, _ in self.again}:
            self.uses[group] += 1
        if self.plan.replay_groups:
            self.uses |= dict.fromkeys(groups, 1)
        for each in ids:
            del self.pieces[each]
        self.updated += 1
        assert updates == [update] == [self.updated - 1]
        self.send(m.Updated(update))

    def evaluate(self, versions: list[int]) -> None:
        self.evaluating = None
        self.send(m.Evaluated(versions[0]))

    def lose(self, box: int) -> None:
        del self.boxes[box]
        for piece in self.pieces.values():
            if piece.instance == box:
                piece.state, piece.instance, piece.left = "waiting", None, None
        if self.evaluating and self.evaluating[0] == box:
            self.evaluating = None
        self.send(m.Lost(box))

    def change(self, plan: Plan) -> None:
        """Gives the run another plan, as a new phase does. It holds from the next restore on."""
        self.plan = plan
        self.oldest = max(self.oldest, plan.staleness)
        self.most_outstanding = max(self.most_outstanding, plan.in_flight)

    def restore(self) -> None:
        snapshot = record(self.controller)
        self.controller = Controller.restore(self.plan, snapshot)
        assert record(self.controller) == replace(snapshot, staleness=self.controller.staleness)
        if not self.plan.auto:
            assert self.controller.staleness == self.plan.staleness
        self.boxes.clear()
        if self.evaluating:
            self.evaluated.remove(self.evaluating[1])  # it is made again
        self.evaluating, self.stopping = None, False
        for trajectory, piece in self.pieces.items():
            piece.instance = None
            if piece.state in ("running", "between"):
                piece.state = "waiting"
            piece.left = None
            if piece.state == "scoring":
                self.rescoring.add(trajectory)
        self.training_again = self.training is not None
        needed = set(self.controller.needed_versions)
        assert self.newest in needed
        assert not needed & self.retired
        if self.plan.paradigm.pinned:
            assert {piece.under for piece in self.pieces.values() if piece.state == "waiting"} <= needed
        self.check()
