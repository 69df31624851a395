"""netmaster's policy engine is in sync with the cluster when it is used, and is computed beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.support.fake_cluster import endpoint, group, network, policy, rule

from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.ids import StoreKey
from weft.domain.ipam import ipam
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.engine.engine_sync import sync_object
from weft.domain.store_types import Change, Entry, Event, Listing
from weft.domain.transaction import holder_of, put_claim
from weft.lab.waiting import DEADLINE, soon, until
from weft.master.api import policy_api
from weft.master.api.policy_api import PolicyView

NET = network("blue", "10.1.1.0/24")
VALUES: tuple[model.Value, ...] = (
    NET,
    policy("p"),
    rule("1", policy="p", action="deny", protocol="tcp", port=81),
    group("shop", policies=("p",)),
    endpoint("web", network="blue", address="10.1.1.1"),
)


def stored(value: model.Value) -> tuple[StoreKey, bytes]:
    kind = next(kind for kind in kinds.ALL if kind.type is type(value))
    return kind.store_key(*kind.key_parts(value)), codec.encode(value)


def listing(*values: model.Value) -> Listing:
    claims = (
        put_claim(ipam.claim_key(NET, *value.addresses), holder_of(kinds.ENDPOINT, value))
        for value in values
        if isinstance(value, model.Endpoint)
    )
    entries = (*(Entry(put.key, put.value, 1) for put in claims), *(Entry(*stored(value), 1) for value in values))
    return Listing(entries, 1)


class Thread:
    """Lets objects wait where a thread takes them up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting, self.may_go_on = threading.Event(), threading.Event()
        self.on_event_loop = 0

        def held(engine: Engine, cluster: Cluster, key: StoreKey) -> object:
            if threading.current_thread() is threading.main_thread():
                self.on_event_loop += 1
            else:
                self.waiting.set()
                assert self.may_go_on.wait(DEADLINE)
            return sync_object(engine, cluster, key)

        monkeypatch.setattr(policy_api, "sync_object", held)


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Thread:
    return Thread(monkeypatch)


@pytest.mark.parametrize("how", ["change", "listing", "cancelled"])
async def test_the_engine_has_what_changed_while_a_thread_built_it(thread: Thread, how: str) -> None:
    view = PolicyView(Cluster())
    view.replace(listing(*VALUES))
    asking = asyncio.create_task(view.engine())
    await until(thread.waiting.is_set)
    more = rule("2", policy="p", action="deny", protocol="tcp", port=82)
    if how == "listing":
        view.replace(listing(*VALUES, more))
    else:
        view.apply(Change(2, (Event(*stored(more)),)))
    if how == "cancelled":
        asking.cancel()
        await asyncio.wait([asking])
        asking = asyncio.create_task(view.engine())
    thread.may_go_on.set()
    engine = await soon(asking)
    (compiled,) = engine.policies.values()
    assert {"contiv/default/p/1", "contiv/default/p/2"} <= {each.id for each in compiled.rules}
    assert set(engine.workloads) == {"default:blue:web"}


async def test_few_changes_are_taken_up_at_once_and_many_on_a_thread(
    thread: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread.may_go_on.set()
    view = PolicyView(Cluster())
    view.replace(listing(*VALUES))
    await soon(view.engine())
    assert thread.on_event_loop == 0
    for limit, number in ((200, 2), (-1, 3)):
        monkeypatch.setattr(policy_api, "INLINE_CHANGES", limit)
        monkeypatch.setattr(policy_api, "QUICK_SIZE", limit)
        changed = rule(str(number), policy="p", action="deny", protocol="tcp", port=80 + number)
        view.apply(Change(number, (Event(*stored(changed)),)))
        if limit < 0:
            thread.waiting.clear()
            asking = asyncio.create_task(view.engine())
            await until(thread.waiting.is_set)
            monkeypatch.setattr(policy_api, "INLINE_CHANGES", 200)
            monkeypatch.setattr(policy_api, "QUICK_SIZE", 200)
            engine = await soon(asking)
        else:
            engine = await soon(view.engine())
            assert thread.on_event_loop == 1
        (compiled,) = engine.policies.values()
        assert f"contiv/default/p/{number}" in {each.id for each in compiled.rules}
