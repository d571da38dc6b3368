"""A controller with shorthands for what can happen to its work."""

from stretto.core import messages as m
from stretto.core.controller import Controller
from stretto.core.paradigms import PARADIGMS
from stretto.core.plan import resolve_plan


class Run:
    """A controller with the commands of the last event, and shorthands for what can happen to its work."""

    def __init__(self, paradigm="multi-version", instances=(8,), **options):
        options = {"batch": 2, "group_size": 1, "updates": 10, "retries": 2} | options
        if PARADIGMS[paradigm].staleness is None:
            options.setdefault("staleness", 2)
        self.plan = resolve_plan(paradigm, **options)
        self.controller = Controller(self.plan)
        self.last = []
        for number, slots in enumerate(instances):
            self.send(m.Joined(number, slots))
        for number in range(len(instances)):
            self.send(m.Loaded(number, 0))

    def send(self, event):
        self.last = self.controller.handle(event)
        return self.last

    def given(self, kind):
        return [command for command in self.last if isinstance(command, kind)]

    def finish(self, *groups):
        """Generate and score every trajectory of some groups; all commands that this led to."""
        size, commands = self.plan.group_size, []
        for group in groups:
            for trajectory in range(group * size, (group + 1) * size):
                commands += self.send(m.Generated(trajectory, 5))
                commands += self.send(m.Scored(trajectory, float(trajectory % size)))
        self.last = commands
        return commands

    def update(self):
        """End the update that runs and confirm every load that follows."""
        commands = self.send(m.Updated(self.controller.training))
        for command in list(commands):
            if isinstance(command, m.LoadVersion | m.SwapVersion):
                commands = commands + self.send(m.Loaded(command.instance, command.version))
        self.last = commands
        return commands

    def wait(self, owner):
        return next((wait for wait in self.controller.waits() if wait.owner == owner), None)
