"""Episodes on a cluster: an actor with a pool of worker processes that play them (`worker_host.py`).

    driver                                          actor
    begin(number, prompt) ------------------------> an episode of the pool; its policy collects messages
    serves them from the policy <------------------ messages, as soon as there is one
    go_on(number, reply) -------------------------> the reply to the turn that was asked for
                 ... <----------------------------- ... until the episode is over

If the actor or its machine dies, another actor replaces it, and its episodes begin again there with the turns that they
had. That is not the fault of a trajectory, and costs it none of its retries.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stretto.cluster.actor_calls import ActorCalls
from stretto.cluster.worker_host import Handlers, HostActor, HostLostError, WorkerHost, WorkerPool
from stretto.environments.episode_pipes import Answer, Ask, Refuse, Reported, Spent, common_length
from stretto.environments.episode_pool import EpisodePool, EpisodePoolOptions
from stretto.environments.episode_server import EpisodeServer
from stretto.environments.protocol import Outcome, Policy
from stretto.environments.replayed_policy import ReplayedPolicy
from stretto.environments.sandbox import Limits
from stretto.environments.spending import Spending
from stretto.environments.worker_process import WorkerOptions
from stretto.errors import RewardError, StrettoError, describe
from stretto.types import Completion, Prompt

log = logging.getLogger(__name__)

RERUNS = 3  # of one episode, each because its actor was lost


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """The options of the `EpisodePool`, wherever it runs."""

    pool: EpisodePoolOptions
    folder: str  # the driver's working directory, where its modules are
    passed: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables of the driver that a worker sees
    sandbox: Limits | None = None
    strict_sandbox: bool = False


@dataclass(frozen=True, slots=True)
class Over:
    """The last message of an episode."""

    reward: float | Outcome | None
    error: StrettoError | None = None


Message = Ask | Spent | Reported | Over


class HostedPolicy:
    """The policy of one episode in the actor: keeps what the episode asks for until the driver collects it."""

    def __init__(self, number: int, prompt: Prompt, left: int, budget: float) -> None:
        self.left = left
        self._number = number
        self._prompt = prompt.tokens
        self._spending = Spending(budget)
        self._known: dict[int, tuple[int, ...]] = {}
        self._messages: list[Message] = []
        self._changed = asyncio.Event()
        self._reply: asyncio.Future[Completion] | None = None

    @property
    def budget_left(self) -> float:
        return self._spending.left

    def spend(self, amount: float, what: str = "") -> None:
        self.say(Spent(self._number, amount, what))  # also if it is refused: the driver records that
        self._spending.spend(amount, what)

    def report(self, reward: float | Outcome) -> None:
        self.say(Reported(self._number, reward))

    async def generate(self, tokens: Sequence[int], *, lineage: int = 0, train: bool = True) -> Completion:
        context = tuple(tokens)
        kept = common_length(self._known.get(lineage, self._prompt), context)
        self._reply = asyncio.get_running_loop().create_future()
        self.say(Ask(self._number, lineage, train, kept, context[kept:]))
        completion = await self._reply
        self._known[lineage] = context + tuple(completion.tokens.tolist())
        return completion

    def say(self, message: Message) -> None:
        self._messages.append(message)
        self._changed.set()

    def answer(self, reply: Answer | Refuse) -> None:
        """Ends the turn that was asked for."""
        assert self._reply is not None
        if self._reply.done():
            return
        if isinstance(reply, Refuse):
            self._reply.set_exception(reply.error)
        else:
            self.left = reply.left
            self._reply.set_result(reply.completion)

    async def messages(self) -> list[Message]:
        """Returns the messages since the last call, as soon as there is one."""
        await self._changed.wait()
        self._changed.clear()
        messages, self._messages = self._messages, []
        return messages


class EpisodeActor(HostActor):
    """The actor of episodes."""

    _options: EpisodeOptions

    def make_pool(self) -> tuple[WorkerPool, Handlers]:
        options = self._options
        variables = WorkerOptions(self.keep, options.passed, options.sandbox, options.strict_sandbox)
        self._episodes = EpisodePool(options.pool, variables)
        self._policies: dict[int, HostedPolicy] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        return self._episodes, {"begin": self._begin, "go_on": self._go_on, "cancel": self._cancel}

    async def _begin(self, number: int, prompt: Prompt, left: int, budget: float) -> list[Message]:
        policy = HostedPolicy(number, prompt, left, budget)
        self._policies[number] = policy
        self._tasks[number] = asyncio.create_task(self._play(number, prompt, policy), name=f"episode {number}")
        return await self._messages(number)

    async def _go_on(self, number: int, reply: Answer | Refuse | None) -> list[Message]:
        if reply is not None:
            self._policies[number].answer(reply)
        return await self._messages(number)

    async def _messages(self, number: int) -> list[Message]:
        messages = await self._policies[number].messages()
        if isinstance(messages[-1], Over):
            self._policies.pop(number, None)  # it is gone if the episode was cancelled
        return messages

    async def _cancel(self, number: int) -> None:
        if (policy := self._policies.pop(number, None)) is not None:
            policy.say(Over(None, RewardError("its episode was cancelled")))  # ends the call that waits for messages
        if (task := self._tasks.get(number)) is not None:
            task.cancel()

    async def _play(self, number: int, prompt: Prompt, policy: HostedPolicy) -> None:
        try:
            over = Over(await self._episodes.episode(prompt, policy))
        except StrettoError as error:
            over = Over(None, error)
        except Exception as error:
            over = Over(None, StrettoError(f"the pool of episode workers failed: {describe(error)}"))
        finally:
            del self._tasks[number]
        policy.say(over)


class RayEpisodes:
    """The environment of a cluster, whose episodes are played by worker processes there. For one event loop."""

    def __init__(
        self,
        options: EpisodeOptions,
        *,
        said: Callable[[str], None],
        instance_seconds: float,
        notice: Callable[[str], None] = log.error,
    ) -> None:
        """`said` gets every line that the environment prints. `notice` gets a sentence for every actor that is lost.

        An actor that does not answer for `instance_seconds` is lost.
        """
        self._name = options.pool.spec.name
        self._numbers = itertools.count()
        self._host = WorkerHost(
            EpisodeActor, options, options.folder,
            what="episodes", said=said, instance_seconds=instance_seconds, notice=notice,
        )  # fmt: skip

    @property
    def replaced(self) -> int:
        """Actors that were lost."""
        return self._host.replaced

    async def start(self) -> None:
        """Starts the actor. Raises `RecipeError` if the environment cannot be imported or made."""
        await self._host.ready()

    async def close(self) -> None:
        """Ends the actor. Episodes in progress raise `RewardError`. Safe to call twice."""
        await self._host.close()

    async def episode(self, prompt: Prompt, policy: Policy) -> float | Outcome:
        """Plays one episode in the actor; if that is lost, again in the next."""
        replayed = ReplayedPolicy(policy)
        lost: ActorCalls | None = None
        for _ in range(RERUNS + 1):
            remote = await self._host.ready(lost)
            try:
                return await self._play(remote, prompt, replayed)
            except HostLostError as error:
                lost = remote
                replayed.restart()
                if self._host.closed:
                    raise RewardError(f"`{self._name}` was stopped before its episode ended") from error
        raise RewardError(f"`{self._name}` lost its actor {RERUNS + 1} times while it played one episode")

    async def _play(self, remote: ActorCalls, prompt: Prompt, policy: Policy) -> float | Outcome:
        number, server = next(self._numbers), EpisodeServer(prompt, policy)
        over = False
        try:
            messages: list[Message] = await remote.call(
                "begin", number, prompt, policy.left, policy.budget_left, bounded=False
            )
            while True:
                reply = None
                for message in messages:
                    if isinstance(message, Over):
                        over = True
                        if message.error is not None:
                            raise message.error
                        assert message.reward is not None
                        return message.reward
                    reply = await server.serve(message)
                messages = await remote.call("go_on", number, reply, bounded=False)
        finally:
            if not over and remote.failure is None:
                remote.ignore(remote.begin("cancel", number))
