"""Parts of a run that begin late, or die as they begin. Actors are fakes: no cluster is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from call_cases import Line
from ray.exceptions import ActorDiedError

import stretto.cluster.actor_calls as actor_calls
import stretto.cluster.actor_placement as placement
import stretto.cluster.rank_group as ranks
import stretto.cluster.worker_host as worker_host
from stretto.cluster.actor_calls import CallServer
from stretto.cluster.rewards import RayRewards, RewardOptions
from stretto.environments.reward_calls import as_specs
from stretto.errors import RewardError, TrainerError
from stretto.training.fake import FakeTrainer


def method(work: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    return SimpleNamespace(remote=work)


def fake_ray(make: Callable[[], Any]) -> Any:
    """Of Ray, what makes actors: `make` makes each of them."""
    factory = SimpleNamespace(remote=lambda *arguments: make())
    factory.options = lambda **asked: factory
    return SimpleNamespace(
        remote=lambda *_, **__: factory if _ else (lambda kind: factory),
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "0" * 56),
        is_initialized=lambda: False,
    )


# -- rewards -----------------------------------------------------------------------------------------------------------


class Host(Line):
    """A host of rewards, which dies as it starts or does not."""

    def __init__(self, dies: bool) -> None:
        async def score(prompt: str, completion: str, row: Any, details: object = None) -> float:
            return 2.0

        async def listen() -> list[str]:
            await asyncio.sleep(60)
            return []

        async def start() -> None:
            if dies:
                raise ActorDiedError()

        async def close() -> None:
            pass

        super().__init__(CallServer({"score": score, "listen": listen}, status=lambda: None, report_s=0.01, idle_s=0.1))
        self.start, self.close = method(start), method(close)


@pytest.mark.parametrize("deaths", [2, 3])
def test_a_host_of_rewards_that_dies_as_it_starts_is_placed_again_three_times_at_most(
    deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: list[Host] = []

    def make() -> Host:
        hosts.append(Host(dies=len(hosts) < deaths))
        return hosts[-1]

    monkeypatch.setattr(worker_host, "ray", fake_ray(make))
    for module in (worker_host, actor_calls):
        monkeypatch.setattr(module, "kill", lambda host: setattr(host, "ended", True))

    async def main() -> None:
        said: list[str] = []
        options = RewardOptions(as_specs("rewards:one"), 1, 1.0, None, ".")
        rewards = RayRewards(options, said=print, instance_seconds=5.0, notice=said.append)
        if deaths < worker_host.STARTS:
            await rewards.start()
            assert await rewards.score("p", "c", {}) == 2.0
        else:
            with pytest.raises(RewardError, match="rewards could not be started on the cluster: ActorDiedError"):
                await rewards.start()
        await rewards.close()
        assert [text.partition(":")[0] for text in said] == ["rewards could not be started on the cluster"] * 2
        assert all("they are placed again" in text for text in said)
        assert all(host.ended for host in hosts), "no process is left behind"

    asyncio.run(main())
    assert len(hosts) == 3


# -- who waits for room ------------------------------------------------------------------------------------------------


def cluster_of(monkeypatch: pytest.MonkeyPatch, placed: Callable[[Any], bool]) -> None:
    monkeypatch.setattr(placement, "is_placed", placed)
    monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(placement.ray, "available_resources", lambda: {"CPU": 1.0})


def test_what_has_room_is_not_said_to_lack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster_of(monkeypatch, lambda actor: bool(actor))
    assert placement.why_not_started([1, 2], "they ask") == (
        "there is room, and what is needed is still being imported there"
    )
    assert placement.why_not_started([1, 0], "they ask for 2 CPUs") == (
        "no machine has taken it yet (1 of 2 have a place): they ask for 2 CPUs, and free in the cluster are 1 of 2 "
        "CPUs, 0 of 0 GPUs; if that is too little, ask for less, or `ray start` another machine"
    )
    assert placement.why_not_started([0], "it asks").startswith("no machine has taken it yet: it asks, and")


def test_ranks_that_find_no_room_say_so_and_are_an_error_at_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never() -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(ranks, "ray", fake_ray(lambda: SimpleNamespace(ready=method(never))))
    monkeypatch.setattr(ranks, "EXPLAIN_S", 0.1)
    monkeypatch.setattr(ranks, "PLACE_S", 0.3)
    cluster_of(monkeypatch, lambda actor: False)

    async def main() -> None:
        group = ranks.RankGroup(ranks.RankOptions(lambda _: FakeTrainer(), count=2, cpus=1.5), deadline_s=5.0)
        asks = r"2 \(`runtime.trainers`\) ask for 1.5 CPUs and 0 GPUs each \(`runtime.trainer_cpus`"
        with pytest.raises(TrainerError, match=f"have not begun after 0.3 s: no machine has taken it yet: {asks}"):
            await group.place()
        with pytest.raises(TrainerError):
            group.check()

    asyncio.run(main())
    assert (
        "the ranks of the trainer have not begun: no machine has taken it yet: 2 (`runtime.trainers`) ask"
        in caplog.text
    )
