"""Figures of services on the linux datapath: what a connection to one costs, and what a change of one takes.

Few services and many, service and backend take turns, and medians are told. Changes are timed from the news of the
store to the kernel that has carried them out, on one node whose tenant has all the services.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from tests.support.policy_testbed import TENANT, Pod, PolicyTestbed, open_ward

from bench import dns
from bench.figures import Figure, Skipped, figure
from weft.agent.dataplane.services import Services
from weft.agent.store.attachment_store import AttachmentStore
from weft.domain import kinds, model
from weft.domain.addresses import Address
from weft.domain.cluster import Cluster
from weft.domain.codec import encode
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import StateItem
from weft.domain.ids import EndpointId, NetworkName, NodeName, ServiceName
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import BalancingTable, Target, pool_of
from weft.domain.policy.model.protocols import TCP, UDP
from weft.domain.store_types import Change, Entry, Event, Listing
from weft.lab.namespaces import stepped_apart

FEW, SOME, MANY = 100, 5_000, 30_000
PROVIDERS = 2
ROUNDS = 7
FIRST_PACKETS, CALLS = 1_000, 1_000
CHANGES, STARTS = 300, 5
VIPS, PODS = 0x0A600000, 0x0A800000  # 10.96.0.0, 10.128.0.0
PORT, TARGET_PORT = 80, 8080
NETWORK = NetworkName("net")
_ENDS_AT_ONCE = struct.pack("ii", 1, 0)


class Served(NamedTuple):
    """A tenant on a node of its own, with real pods behind all its services."""

    ward: PolicyTestbed
    client: Pod
    backend: Pod
    services: int


def run() -> dict[str, Figure]:
    if os.geteuid() != 0:
        raise Skipped("it makes network namespaces, which takes root")
    with tempfile.TemporaryDirectory() as directory, stepped_apart(), ExitStack() as stack:
        few, many, changing = (
            stack.enter_context(open_ward(_folder(directory, name))) for name in ("few", "many", "changing")
        )
        served = _serve(many, MANY)
        return {
            **_measure_first_packets(_serve(few, FEW), served),
            **_measure_calls(served),
            **_measure_changes(changing),
            **dns.run(),
        }


def _folder(directory: str, name: str) -> Path:
    folder = Path(directory) / name
    folder.mkdir()
    return folder


def _serve(ward: PolicyTestbed, services: int) -> Served:
    client, backend = ward.pod(1), ward.pod(2)
    table = BalancingTable(TENANT)
    pool = pool_of([Target(backend.address(4), TARGET_PORT)])
    for number in range(services):
        vip = Address(4, VIPS + number)
        table.put(f"s{number}", {FrontendKey(vip, UDP, PORT): pool, FrontendKey(vip, TCP, PORT): pool})
    ward.datapath.apply(_parts(table))
    return Served(ward, client, backend, services)


def _parts(table: BalancingTable) -> Difference[StateItem]:
    return table.refresh()  # type: ignore[return-value]  # a service part is a part


def _measure_first_packets(few: Served, many: Served) -> dict[str, Figure]:
    found: dict[int, list[float]] = {FEW: [], MANY: []}
    turns = count()
    for _ in range(ROUNDS):
        for served in (few, many):
            found[served.services] += _first_packets(served, turns)
    figures = {}
    for name, pick, bound in (("median", median, 1.15), ("p99", _p99, 1.3)):
        ours, peer = pick(found[MANY]), pick(found[FEW])
        figures[f"first packet, {MANY} services, {name}"] = figure(
            ours, peer=peer, unit="us", target=bound * peer, note=f"UDP, one way; peer: {FEW} services"
        )
    return figures


def _first_packets(served: Served, turns: Iterator[int]) -> list[float]:
    """Microseconds from sending to having been received, each by a socket and to a service of its own."""
    times = []
    with served.backend.open_socket(4, socket.SOCK_DGRAM, port=TARGET_PORT) as ear:
        ear.settimeout(5)
        for _ in range(FIRST_PACKETS):
            vip = Address(4, VIPS + next(turns) * 7919 % served.services)
            with served.client.open_socket(4, socket.SOCK_DGRAM) as caller:
                where = (str(vip), PORT)
                began = time.perf_counter_ns()
                caller.sendto(b"?", where)
                ear.recv(64)
                times.append((time.perf_counter_ns() - began) / 1e3)
    return times


def _measure_calls(served: Served) -> dict[str, Figure]:
    through, direct = [], []
    where = str(Address(4, VIPS + 7)), PORT
    with served.backend.open_socket(4, socket.SOCK_STREAM, port=TARGET_PORT) as ear:
        ear.listen(64)
        ear.settimeout(5)
        for _ in range(ROUNDS):
            through.append(_calls(served.client, ear, where))
            direct.append(_calls(served.client, ear, (str(served.backend.address(4)), TARGET_PORT)))
    ours, peer = median(through), median(direct)
    return {
        "connections through a service": figure(
            ours, peer=peer, unit="1/s", target=0.8 * peer, more_is_better=True, note="TCP on one node; peer: direct"
        )
    }


def _calls(client: Pod, ear: socket.socket, where: tuple[str, int]) -> float:
    """Connections per second, one after the other, each reset at its end."""
    began = time.perf_counter()
    for _ in range(CALLS):
        with client.open_socket(4, socket.SOCK_STREAM) as caller:
            caller.settimeout(5)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ENDS_AT_ONCE)
            caller.connect(where)
            ear.accept()[0].close()
    return CALLS / (time.perf_counter() - began)


def _measure_changes(ward: PolicyTestbed) -> dict[str, Figure]:
    starts = [_start(ward) for _ in range(STARTS)]
    cluster = _cluster(MANY)
    topic = Services(cluster, node=NodeName("one"), journal=AttachmentStore())
    ward.datapath.apply(topic.refresh({TENANT}))
    times = [_change(ward, cluster, topic, number) for number in range(CHANGES)]
    note = f"{PROVIDERS} endpoints to a service; from the store's news to the kernel"
    return {
        f"{SOME} services from nothing": figure(median(starts), unit="s", target=1.0, note=note),
        f"endpoint change, {MANY} services, median": figure(median(times), unit="ms", note=note),
        f"endpoint change, {MANY} services, p99": figure(_p99(times), unit="ms", target=50.0, note=note),
    }


def _start(ward: PolicyTestbed) -> float:
    topic = Services(_cluster(SOME), node=NodeName("one"), journal=AttachmentStore())
    began = time.perf_counter()
    difference = topic.refresh({TENANT})
    ward.datapath.apply(difference)
    took = time.perf_counter() - began
    ward.datapath.apply(Difference((), difference.put))
    return took


def _change(ward: PolicyTestbed, cluster: Cluster, topic: Services, number: int) -> float:
    """One endpoint provides no more, or does so again."""
    labels = {} if number % 2 == 0 else {"app": f"a{number - 1}"}
    endpoint = _endpoint(number // 2 * 2, 0, labels=labels)
    key = kinds.ENDPOINT.store_key(*endpoint.key)
    value = encode(endpoint)
    began = time.perf_counter()
    cluster.apply(Change(number + 2, (Event(key, value),)))
    topic.follow(key)
    ward.datapath.apply(topic.refresh({TENANT}))
    return (time.perf_counter() - began) * 1e3


def _cluster(services: int) -> Cluster:
    values: list[tuple[kinds.Kind[model.Service] | kinds.Kind[model.Endpoint], model.Value]] = []
    for number in range(services):
        values.append((kinds.SERVICE, _service(number)))
        values += [(kinds.ENDPOINT, _endpoint(number, each)) for each in range(PROVIDERS)]
    cluster = Cluster()
    entries = (
        Entry(kind.store_key(*kind.key_parts(value)), encode(value), 1)  # type: ignore[arg-type]  # each of its kind
        for kind, value in values
    )
    cluster.replace(Listing(tuple(entries), 1))
    return cluster


def _service(number: int) -> model.Service:
    return model.Service(
        tenant=TENANT,
        name=ServiceName(f"s{number}"),
        network=NETWORK,
        selectors=(f"app=a{number}",),
        ports=(f"{PORT}:{TARGET_PORT}:TCP",),
        vip=str(Address(4, VIPS + number)),
    )


def _endpoint(number: int, each: int, *, labels: dict[str, str] | None = None) -> model.Endpoint:
    return model.Endpoint(
        tenant=TENANT,
        network=NETWORK,
        endpoint_id=EndpointId(f"e{number}-{each}"),
        ip_address=str(Address(4, PODS + number * PROVIDERS + each)),
        host="two",
        labels={"app": f"a{number}"} if labels is None else labels,
    )


def _p99(times: list[float]) -> float:
    return quantiles(times, n=100)[98]
