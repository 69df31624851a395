"""Services on the linux datapath: the cost of a connection to a service, and of a change.

Few and many services, and service and direct backend, alternate, and medians are reported. Changes are timed from the
store event to the applied kernel state, on one node whose tenant has all services.
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

from tests.support.policy_testbed import TENANT, Pod, PolicyTestbed, open_testbed

from bench import dns
from bench.figures import Figure, Skipped, figure
from weft.agent.dataplane.services import Services
from weft.agent.store.attachment_store import AttachmentStore
from weft.domain import kinds, model
from weft.domain.addresses import Address, address_hex
from weft.domain.cluster import Cluster
from weft.domain.codec import encode
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import StateItem
from weft.domain.ids import EndpointId, NetworkName, NodeName, ServiceName, StoreKey
from weft.domain.ipam.allocator import BLOCK_SIZE
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import LoadBalancerTable, Target, pool_of
from weft.domain.policy.model.protocols import TCP, UDP
from weft.domain.store_types import Change, Entry, Event, Listing
from weft.lab.namespaces import private_namespaces

FEW, SOME, MANY = 100, 5_000, 30_000
PROVIDERS = 2
ROUNDS = 7
FIRST_PACKETS, CALLS = 1_000, 1_000
CHANGES, STARTS = 300, 5
VIPS, PODS = 0x0A600000, 0x0A800000  # 10.96.0.0, 10.128.0.0
PORT, TARGET_PORT = 80, 8080
NETWORK = NetworkName("net")
_LINGER_RST = struct.pack("ii", 1, 0)


class Served(NamedTuple):
    """A tenant on its own node, with real pods as backends of all its services."""

    testbed: PolicyTestbed
    client: Pod
    backend: Pod
    services: int


def run() -> dict[str, Figure]:
    if os.geteuid() != 0:
        raise Skipped("creating network namespaces needs root")
    with tempfile.TemporaryDirectory() as directory, private_namespaces(), ExitStack() as stack:
        few, many, changing = (
            stack.enter_context(open_testbed(_folder(directory, name))) for name in ("few", "many", "changing")
        )
        served = _serve(many, MANY)
        return {
            **_measure_first_packets(_serve(few, FEW), served),
            **_measure_connections(served),
            **_measure_changes(changing),
            **dns.run(),
        }


def _folder(directory: str, name: str) -> Path:
    folder = Path(directory) / name
    folder.mkdir()
    return folder


def _serve(testbed: PolicyTestbed, services: int) -> Served:
    client, backend = testbed.pod(1), testbed.pod(2)
    table = LoadBalancerTable(TENANT)
    pool = pool_of([Target(backend.address(4), TARGET_PORT)])
    for number in range(services):
        vip = Address(4, VIPS + number)
        table.put(f"s{number}", {FrontendKey(vip, UDP, PORT): pool, FrontendKey(vip, TCP, PORT): pool})
    testbed.datapath.apply(_state_items(table))
    return Served(testbed, client, backend, services)


def _state_items(table: LoadBalancerTable) -> Difference[StateItem]:
    return table.refresh()  # type: ignore[return-value]  # a service item is a state item


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
    """Microseconds from send to receive, each with a new socket to another service."""
    times = []
    with served.backend.open_socket(4, socket.SOCK_DGRAM, port=TARGET_PORT) as listener:
        listener.settimeout(5)
        for _ in range(FIRST_PACKETS):
            vip = Address(4, VIPS + next(turns) * 7919 % served.services)
            with served.client.open_socket(4, socket.SOCK_DGRAM) as connection:
                where = (str(vip), PORT)
                began = time.perf_counter_ns()
                connection.sendto(b"?", where)
                listener.recv(64)
                times.append((time.perf_counter_ns() - began) / 1e3)
    return times


def _measure_connections(served: Served) -> dict[str, Figure]:
    through, direct = [], []
    where = str(Address(4, VIPS + 7)), PORT
    with served.backend.open_socket(4, socket.SOCK_STREAM, port=TARGET_PORT) as listener:
        listener.listen(64)
        listener.settimeout(5)
        for _ in range(ROUNDS):
            through.append(_connections_per_second(served.client, listener, where))
            direct.append(
                _connections_per_second(served.client, listener, (str(served.backend.address(4)), TARGET_PORT))
            )
    ours, peer = median(through), median(direct)
    return {
        "connections through a service": figure(
            ours, peer=peer, unit="1/s", target=0.8 * peer, more_is_better=True, note="TCP on one node; peer: direct"
        )
    }


def _connections_per_second(client: Pod, listener: socket.socket, where: tuple[str, int]) -> float:
    """Sequential TCP connections per second, each closed with RST."""
    began = time.perf_counter()
    for _ in range(CALLS):
        with client.open_socket(4, socket.SOCK_STREAM) as connection:
            connection.settimeout(5)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RST)
            connection.connect(where)
            listener.accept()[0].close()
    return CALLS / (time.perf_counter() - began)


def _measure_changes(testbed: PolicyTestbed) -> dict[str, Figure]:
    starts = [_start(testbed) for _ in range(STARTS)]
    cluster = _cluster(MANY)
    feature = Services(cluster, node=NodeName("one"), attachment_store=AttachmentStore())
    testbed.datapath.apply(feature.refresh({TENANT}))
    times = [_change(testbed, cluster, feature, number) for number in range(CHANGES)]
    note = f"{PROVIDERS} endpoints per service; from the store's event to the kernel"
    return {
        f"full sync of {SOME} services": figure(median(starts), unit="s", target=1.0, note=note),
        f"endpoint change, {MANY} services, median": figure(median(times), unit="ms", note=note),
        f"endpoint change, {MANY} services, p99": figure(_p99(times), unit="ms", target=50.0, note=note),
    }


def _start(testbed: PolicyTestbed) -> float:
    feature = Services(_cluster(SOME), node=NodeName("one"), attachment_store=AttachmentStore())
    began = time.perf_counter()
    difference = feature.refresh({TENANT})
    testbed.datapath.apply(difference)
    took = time.perf_counter() - began
    testbed.datapath.apply(Difference((), difference.put))
    return took


def _change(testbed: PolicyTestbed, cluster: Cluster, feature: Services, number: int) -> float:
    """Remove an endpoint from its service, or add it again."""
    labels = {} if number % 2 == 0 else {"app": f"a{number - 1}"}
    endpoint = _endpoint(number // 2 * 2, 0, labels=labels)
    key = kinds.ENDPOINT.store_key(*endpoint.key)
    value = encode(endpoint)
    began = time.perf_counter()
    cluster.apply(Change(number + 2, (Event(key, value),)))
    feature.follow(key)
    testbed.datapath.apply(feature.refresh({TENANT}))
    return (time.perf_counter() - began) * 1e3


def _cluster(services: int) -> Cluster:
    values: list[tuple[kinds.Kind[model.Service] | kinds.Kind[model.Endpoint], model.Value]] = []
    for number in range(services):
        values.append((kinds.SERVICE, _service(number)))
        values += [(kinds.ENDPOINT, _endpoint(number, each)) for each in range(PROVIDERS)]
    cluster = Cluster()
    entries = (
        Entry(kind.store_key(*kind.key_parts(value)), encode(value), 1)  # type: ignore[arg-type]  # each value matches its kind
        for kind, value in values
    )
    # Endpoints are backends only with an address of a block of their node.
    blocks = (
        Entry(StoreKey(kinds.blocks_of(TENANT, NETWORK) + address_hex(Address(4, first))), encode(block), 1)
        for block in (model.Block(owner="two"),)
        for first in range(PODS, PODS + services * PROVIDERS, BLOCK_SIZE)
    )
    cluster.replace(Listing((*blocks, *entries), 1))
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
