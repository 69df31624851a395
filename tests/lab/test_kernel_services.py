"""Connections to services, by packets: load balancing, rejection and affinity (contiv 10.7)."""

from __future__ import annotations

import errno
import itertools
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from tests.support.modes import BOTH_MODES
from tests.support.policy_testbed import TENANT, Pod, PolicyTestbed, policy_entry

from weft.adapters.netns.nft import table
from weft.adapters.netns.nft.service_maps import service_entries
from weft.adapters.netns.nft.table import SPARE_SELECTORS
from weft.domain.addresses import Address, parse_address
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import Gateway, StateItem
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import LoadBalancerTable, Target, pool_of
from weft.domain.policy.model.protocols import ICMP, SCTP, TCP, UDP
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import VERDICT_DENY
from weft.kernel.nftables import open_nftables
from weft.lab.waiting import DEADLINE

pytestmark = BOTH_MODES

VIPS = {family: parse_address(text, field="vip") for family, text in ((4, "10.0.9.9"), (6, "fd00::9:9"))}
GATEWAY = Gateway(TENANT, parse_address("fd00::ffff", field="gateway"))
ALLOW, DENY = 0x111, VERDICT_DENY | 0x222
PORT, TARGET_PORT = 80, 8080
KINDS = {TCP: socket.SOCK_STREAM, UDP: socket.SOCK_DGRAM}


class Services:
    """The load balancer table of the testbed's tenant, applied at once."""

    def __init__(self, testbed: PolicyTestbed) -> None:
        self._testbed = testbed
        self._table = LoadBalancerTable(TENANT)

    def put(
        self,
        family: int,
        protocol: int,
        pods: Sequence[Pod],
        *,
        affinity: int = 0,
        name: str = "web",
        target_port: int = TARGET_PORT,
    ) -> None:
        targets = (Target(pod.address(family), target_port) for pod in pods)
        self._table.put(name, {FrontendKey(VIPS[family], protocol, PORT): pool_of(targets, affinity=affinity)})
        self._testbed.datapath.apply(self._table.refresh())  # type: ignore[arg-type]  # a service item is a state item

    def remove(self, name: str = "web") -> None:
        self._table.remove(name)
        self._testbed.datapath.apply(self._table.refresh())  # type: ignore[arg-type]  # a service item is a state item

    @property
    def items(self) -> set[StateItem]:
        return set(self._table.state_items())


@pytest.fixture
def services(testbed: PolicyTestbed) -> Services:
    """No services yet. Without an address of its own the kernel sends no ICMPv6 errors."""
    testbed.datapath.apply(Difference((GATEWAY,), ()))
    return Services(testbed)


@contextmanager
def answering(pods: Sequence[Pod], protocol: int, *, family: int) -> Iterator[dict[socket.socket, Pod]]:
    """Sockets of the pods where the service's connections should end."""
    with ExitStack() as closing:
        listeners = {}
        for pod in pods:
            listener = closing.enter_context(pod.open_socket(family, KINDS[protocol], port=TARGET_PORT))
            if protocol == TCP:
                listener.listen(64)
            listeners[listener] = pod
        yield listeners


def readable_listener(listeners: dict[socket.socket, Pod]) -> socket.socket:
    """A listener that is readable; there must be one."""
    found, _, _ = select.select(list(listeners), [], [], DEADLINE)
    assert found, "no listener is readable"
    listener: socket.socket = found[0]
    return listener


def probe(client: Pod, listeners: dict[socket.socket, Pod], protocol: int, *, family: int) -> tuple[Pod, Address]:
    """Connect to the service once from a new socket; return backend and source. The reply came from the VIP."""
    where = (str(VIPS[family]), PORT)
    with client.open_socket(family, KINDS[protocol]) as caller:
        if protocol == UDP:
            caller.sendto(b"?", where)
            listener = readable_listener(listeners)
            _, source = listener.recvfrom(64)
            listener.sendto(b"!", source)
        else:
            assert caller.connect_ex(where) in (0, errno.EINPROGRESS)
            listener = readable_listener(listeners)
            connection, source = listener.accept()
            with connection:
                connection.sendall(b"!")
        assert select.select([caller], [], [], DEADLINE)[0], "no answer came"
        answer, origin = caller.recvfrom(64)
        assert answer == b"!"
        if protocol == UDP:
            assert origin[:2] == where
        return listeners[listener], parse_address(source[0], field="source")


def refused(client: Pod, protocol: int, *, family: int, port: int = PORT) -> bool:
    """Return whether the client gets an error at once."""
    with client.open_socket(family, KINDS[protocol]) as caller:
        started = caller.connect_ex((str(VIPS[family]), port))
        if protocol == UDP:
            caller.send(b"?")
        else:
            assert started == errno.EINPROGRESS
        poll = select.poll()
        poll.register(caller, select.POLLERR | select.POLLHUP)
        assert poll.poll(DEADLINE * 1000), "no error was reported"
        return caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_a_service_spreads_connections_over_its_backends(
    testbed: PolicyTestbed, services: Services, family: int, protocol: int
) -> None:
    """S1: every backend gets its share and sees the client's address; replies come from the VIP."""
    client, *backends = (testbed.pod(number) for number in range(1, 5))
    services.put(family, protocol, backends)
    with answering(backends, protocol, family=family) as listeners:
        probed = [probe(client, listeners, protocol, family=family) for _ in range(90)]
    assert {source for _, source in probed} == {client.address(family)}
    shares = Counter(pod.number for pod, _ in probed)
    assert len(shares) == 3
    assert min(shares.values()) >= 10  # the mean is 30; fewer than 10 has a probability of one in a million


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_a_pod_reaches_itself_through_a_service(
    testbed: PolicyTestbed, services: Services, family: int, protocol: int
) -> None:
    pod = testbed.pod(1)
    services.put(family, protocol, [pod])
    with answering([pod], protocol, family=family) as listeners:
        probed, source = probe(pod, listeners, protocol, family=family)
    assert probed is pod
    assert source != pod.address(family)


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_a_frontend_without_backends_rejects_at_once(
    testbed: PolicyTestbed, services: Services, family: int, protocol: int
) -> None:
    """A service without backends, and a port that the service does not have."""
    client, backend = testbed.pod(1), testbed.pod(2)
    services.put(family, protocol, [])
    assert refused(client, protocol, family=family)
    services.put(family, protocol, [backend])
    assert refused(client, protocol, family=family, port=PORT + 1)
    with answering([backend], protocol, family=family) as listeners:
        assert probe(client, listeners, protocol, family=family)[0] is backend


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_a_client_stays_with_its_backend(
    testbed: PolicyTestbed, services: Services, family: int, protocol: int
) -> None:
    """Session affinity: other backends may change, until its own is removed."""
    client, *backends = (testbed.pod(number) for number in range(1, 6))
    services.put(family, protocol, backends[:3], affinity=600)
    with answering(backends, protocol, family=family) as listeners:
        first, _ = probe(client, listeners, protocol, family=family)
        for pool in (backends, [first, backends[3]], [first], backends):
            services.put(family, protocol, pool, affinity=600)
            assert {probe(client, listeners, protocol, family=family)[0].number for _ in range(5)} == {first.number}
        others = [pod for pod in backends if pod is not first]
        services.put(family, protocol, others, affinity=600)
        second = {probe(client, listeners, protocol, family=family)[0].number for _ in range(5)}
        assert len(second) == 1
        assert second < {pod.number for pod in others}


@pytest.mark.parametrize("affinity", [0, 600])
def test_no_connection_fails_while_backends_change(testbed: PolicyTestbed, services: Services, affinity: int) -> None:
    """S3: every connection reaches a backend during the changes."""
    client, *backends = (testbed.pod(number) for number in range(1, 5))
    services.put(4, TCP, backends, affinity=affinity)
    done = threading.Event()

    def change() -> None:
        for number in itertools.count(1):
            if done.is_set():
                return
            services.put(4, TCP, backends[: number % 3 + 1], affinity=affinity)

    with ThreadPoolExecutor(1) as other, answering(backends, TCP, family=4) as listeners:
        changing = other.submit(change)
        try:
            for _ in range(300):
                probe(client, listeners, TCP, family=4)
        finally:
            done.set()
        changing.result(DEADLINE)


def test_affinity_expires(testbed: PolicyTestbed, services: Services) -> None:
    client, *backends = (testbed.pod(number) for number in range(1, 10))
    services.put(4, UDP, backends, affinity=1)
    with answering(backends, UDP, family=4) as listeners:
        met: set[int] = set()
        deadline = time.monotonic() + DEADLINE
        while len(met) < 2 and time.monotonic() < deadline:
            met.add(probe(client, listeners, UDP, family=4)[0].number)
            select.select([], [], [], 1.2)
    assert len(met) == 2


@pytest.mark.parametrize("family", [4, 6])
def test_a_udp_flow_leaves_a_removed_backend(testbed: PolicyTestbed, services: Services, family: int) -> None:
    """A client that keeps sending from one socket is not pinned to its first backend."""
    client, one, two = (testbed.pod(number) for number in range(1, 4))
    where = (str(VIPS[family]), PORT)
    with (
        answering([one, two], UDP, family=family) as listeners,
        client.open_socket(family, socket.SOCK_DGRAM) as caller,
    ):
        for backend in (one, two, one):
            services.put(family, UDP, [backend])
            caller.sendto(b"?", where)
            listener = readable_listener(listeners)
            assert listeners[listener] is backend
            listener.recvfrom(64)


@pytest.mark.parametrize("family", [4, 6])
def test_a_udp_flow_follows_a_backend_to_another_port(testbed: PolicyTestbed, services: Services, family: int) -> None:
    """The backend is the same pod with another port."""
    client, backend = testbed.pod(1), testbed.pod(2)
    where = (str(VIPS[family]), PORT)
    with client.open_socket(family, socket.SOCK_DGRAM) as caller:
        for port in (8080, 9090, 8080):
            services.put(family, UDP, [backend], target_port=port)
            with backend.open_socket(family, socket.SOCK_DGRAM, port=port) as listener:
                listener.settimeout(DEADLINE)
                caller.sendto(b"?", where)
                assert listener.recv(64) == b"?"


@pytest.mark.parametrize("family", [4, 6])
def test_a_udp_flow_leaves_a_backend_removed_during_a_restart(
    testbed: PolicyTestbed, services: Services, family: int
) -> None:
    """The same if it was removed while no agent was running."""
    client, one, two = (testbed.pod(number) for number in range(1, 4))
    where = (str(VIPS[family]), PORT)
    services.put(family, UDP, [one])
    with (
        answering([one, two], UDP, family=family) as listeners,
        client.open_socket(family, socket.SOCK_DGRAM) as caller,
    ):
        caller.sendto(b"?", where)
        readable_listener(listeners).recvfrom(64)
        testbed.restart()
        other = LoadBalancerTable(TENANT)
        other.put("web", {FrontendKey(VIPS[family], UDP, PORT): pool_of([Target(two.address(family), TARGET_PORT)])})
        other.refresh()
        testbed.datapath.converge(testbed.items([client, one, two]) | set(other.state_items()) | {GATEWAY})
        caller.sendto(b"?", where)
        assert listeners[readable_listener(listeners)] is two


@pytest.mark.parametrize("family", [4, 6])
def test_stats_are_counted_by_client_and_backend(testbed: PolicyTestbed, services: Services, family: int) -> None:
    """W45: in both directions, with the right addresses."""
    client, backend = testbed.pod(1), testbed.pod(2)
    services.put(family, UDP, [backend])
    with answering([backend], UDP, family=family) as listeners:
        for _ in range(3):
            probe(client, listeners, UDP, family=family)
    (use,) = testbed.datapath.service_flows()
    assert (use.tenant, use.client, use.provider) == (TENANT, client.address(family), backend.address(family))
    assert use.frontend == FrontendKey(VIPS[family], UDP, PORT)
    assert use.packets_in == use.packets_out == 3
    assert use.bytes_in == use.bytes_out == 3 * (29 if family == 4 else 49)


def test_a_ping_of_a_vip_is_rejected_at_once(testbed: PolicyTestbed, services: Services) -> None:
    """A VIP answers no echo request: the client gets an ICMP error."""
    client, backend = testbed.pod(1), testbed.pod(2)
    services.put(4, TCP, [backend])
    with client.open_socket(4, socket.SOCK_RAW, ICMP) as caller:
        caller.sendto(struct.pack(">BBHHH", 8, 0, 0xF7FD, 1, 1), (str(VIPS[4]), 0))
        assert select.select([caller], [], [], DEADLINE)[0]
        assert caller.recv(256)[20] == 3


@pytest.mark.parametrize("family", [4, 6])
def test_policy_is_evaluated_for_the_backend(testbed: PolicyTestbed, services: Services, family: int) -> None:
    """Rules match the backend's port, whatever the service's port is."""
    client, backend = testbed.pod(1), testbed.pod(2)
    everything = policy_entry(Direction.INGRESS, backend, None, DENY)
    testbed.put(
        everything,
        policy_entry(Direction.INGRESS, backend, client, ALLOW, protocol=TCP, ports=(TARGET_PORT, TARGET_PORT)),
    )
    services.put(family, TCP, [backend])
    with answering([backend], TCP, family=family) as listeners:
        assert probe(client, listeners, TCP, family=family)[0] is backend
        testbed.drop(
            policy_entry(Direction.INGRESS, backend, client, ALLOW, protocol=TCP, ports=(TARGET_PORT, TARGET_PORT))
        )
        testbed.put(policy_entry(Direction.INGRESS, backend, client, ALLOW, protocol=TCP, ports=(PORT, PORT)))
        with client.open_socket(family, socket.SOCK_STREAM) as caller:
            caller.connect_ex((str(VIPS[family]), PORT))
            (listener,) = listeners
            assert testbed.packet_result(listener, client.address(family)) == DENY


def test_a_removed_service_is_unreachable(testbed: PolicyTestbed, services: Services) -> None:
    """S7: nothing of it is left in the kernel."""
    client, backend = testbed.pod(1), testbed.pod(2)
    for protocol in (TCP, UDP, SCTP):
        services.put(4, protocol, [backend], affinity=60, name=str(protocol))
    wanted = {entry for item in services.items for entry in service_entries(item)}  # type: ignore[arg-type]
    assert wanted <= testbed.netns.table.read()
    for protocol in (TCP, UDP, SCTP):
        services.remove(str(protocol))
    assert not wanted & testbed.netns.table.read()
    with client.open_socket(4, socket.SOCK_STREAM) as caller:
        caller.connect_ex((str(VIPS[4]), PORT))
        poll = select.poll()
        poll.register(caller, select.POLLERR)
        assert poll.poll(DEADLINE * 1000)
        assert caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (errno.ENETUNREACH, errno.EHOSTUNREACH)


def pick_chains(testbed: PolicyTestbed) -> list[str]:
    """The chains that pick backends, in the tenant's netns."""
    with open_nftables(testbed.netns.namespace) as nftables:
        listed = nftables.read("list chains inet", elements=False)
    return [each["chain"]["name"] for each in listed if each.get("chain", {}).get("name", "").startswith("lb_pick")]


def test_L3_chains_that_no_frontend_needs_are_removed(testbed: PolicyTestbed, services: Services) -> None:
    """With every change of affinity or number of backends there is a new chain. The service works throughout."""
    client, one, two = (testbed.pod(number) for number in (1, 2, 3))
    with answering([one, two], TCP, family=4) as listeners:
        for number in range(3 * SPARE_SELECTORS):
            services.put(4, TCP, [one, two][: number % 2 + 1], affinity=number + 1)
            if number % 16 == 0:
                probe(client, listeners, TCP, family=4)
        # Two families for each selector.
        assert len(pick_chains(testbed)) <= 2 * (SPARE_SELECTORS + 2)
        testbed.restart()
        testbed.datapath.converge(testbed.items([client, one, two]) | services.items | {GATEWAY})
        assert len(pick_chains(testbed)) == 2
        probe(client, listeners, TCP, family=4)


def test_services_are_read_back_and_repaired(testbed: PolicyTestbed, services: Services) -> None:
    """S6: a restarted process repairs drift without breaking flows."""
    client, backend = testbed.pod(1), testbed.pod(2)
    services.put(4, TCP, [backend])
    wanted = testbed.items([client, backend]) | services.items | {GATEWAY}
    testbed.restart()
    assert testbed.datapath.converge(wanted).repaired == ()
    testbed.netns.nftables.run("flush table inet weft; flush map inet weft services4; flush map inet weft lb_slots4")
    assert testbed.datapath.converge(wanted).repaired
    with answering([backend], TCP, family=4) as listeners:
        assert probe(client, listeners, TCP, family=4)[0] is backend


def test_a_rebuilt_table_gets_everything_back(
    testbed: PolicyTestbed, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without drift, but after a rebuild no entry counts as confirmed."""
    client, backend = testbed.pod(1), testbed.pod(2)
    services.put(4, TCP, [backend])
    deny = policy_entry(Direction.INGRESS, backend, None, DENY)
    testbed.put(deny)
    wanted = testbed.items([client, backend], [deny]) | services.items | {GATEWAY}
    testbed.datapath.converge(wanted)
    assert testbed.datapath.converge(wanted).repaired == ()
    monkeypatch.setattr(table, "BASE", "add rule inet weft nowhere drop\n")
    assert testbed.datapath.converge(wanted).repaired
    with client.open_socket(4, socket.SOCK_STREAM) as caller, answering([backend], TCP, family=4) as listeners:
        caller.connect_ex((str(VIPS[4]), PORT))
        (listener,) = listeners
        assert testbed.packet_result(listener, client.address(4)) == DENY
