"""The latest drops, and those who follow them."""

from __future__ import annotations

import pytest

from weft.agent.observe.drops import KEPT, MOST_FOLLOWERS, STOPPING, TOO_SLOW, UNREAD, DropLog, End, NamedDrop, Wanted
from weft.domain.errors import Unavailable
from weft.domain.ids import TenantName
from weft.domain.policy.model.protocols import TCP


def told(number: int = 0, *, tenant: str = "default", pod: str = "lab/a") -> NamedDrop:
    end = End(address=f"10.1.1.{number % 250}", port=number, identity=f"{tenant}:net:a", pod=pod)
    return NamedDrop(
        at=float(number), tenant=TenantName(tenant), rule="r", reason="", protocol=TCP, service="tcp/1",
        source=end, target=end,
    )  # fmt: skip


def test_the_latest_are_remembered() -> None:
    log = DropLog()
    log.add(told(number) for number in range(KEPT + 5))
    assert [drop.at for drop in log.recent(Wanted())] == [float(number) for number in range(5, KEPT + 5)]
    assert log.total == KEPT + 5
    assert len(log.recent(Wanted(since=KEPT))) == 5


@pytest.mark.parametrize("pod", ["lab/a", "a", "default:net:a", "10.1.1.0"])
def test_drops_are_asked_for_by_tenant_and_pod(pod: str) -> None:
    log = DropLog()
    log.add([told(), told(1, tenant="blue", pod="lab/b")])
    assert [drop.tenant for drop in log.recent(Wanted(tenant="default", pod=pod))] == ["default"]
    assert [drop.tenant for drop in log.recent(Wanted(pod="b"))] == ["blue"]
    assert log.recent(Wanted(tenant="blue", pod="lab/a")) == []
    assert log.recent(Wanted(pod="c")) == []


async def test_a_follower_gets_what_it_wants_from_now_on() -> None:
    log = DropLog()
    log.add([told(1)])
    with log.following(Wanted(tenant="default")) as follower:
        log.add([told(2), told(3, tenant="blue"), told(4)])
        assert [drop.at for drop in await follower.take(within=30)] == [2.0, 4.0]
        assert await follower.take(within=0.01) == []
        log.end_all()
        assert await follower.take(within=30) == []
        assert follower.ended == STOPPING


async def test_a_follower_that_does_not_read_is_cut_off_and_nobody_else() -> None:
    log = DropLog()
    with log.following(Wanted()) as slow, log.following(Wanted()) as quick:
        for number in range(UNREAD + 1):
            log.add([told(number)])
            await quick.take(within=30)
        log.add([told()])
        assert (slow.ended, quick.ended) == (TOO_SLOW, "")
        assert len(await slow.take(within=30)) == UNREAD
        assert len(await quick.take(within=30)) == 1


def test_followers_are_few() -> None:
    log = DropLog()
    followings = [log.following(Wanted()) for _ in range(MOST_FOLLOWERS)]
    for each in followings:
        each.__enter__()
    with pytest.raises(Unavailable), log.following(Wanted()):
        pass
    for each in followings:
        each.__exit__(None, None, None)
    with log.following(Wanted()):
        pass
