"""Connections to services, by packets: who answers, who is refused, and what is remembered (contiv 10.7)."""

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
from tests.support.policy_testbed import TENANT, Pod, PolicyTestbed, row

from weft.adapters.netns.nft import table
from weft.adapters.netns.nft.service_maps import service_entries
from weft.domain.addresses import Address, parse_address
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import Gateway, StateItem
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import BalancingTable, Target, pool_of
from weft.domain.policy.model.protocols import ICMP, SCTP, TCP, UDP
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import VERDICT_DENY
from weft.lab.waiting import DEADLINE

pytestmark = BOTH_MODES

VIPS = {family: parse_address(text, field="vip") for family, text in ((4, "10.0.9.9"), (6, "fd00::9:9"))}
GATEWAY = Gateway(TENANT, parse_address("fd00::ffff", field="gateway"))
ALLOW, DENY = 0x111, VERDICT_DENY | 0x222
PORT, TARGET_PORT = 80, 8080
KINDS = {TCP: socket.SOCK_STREAM, UDP: socket.SOCK_DGRAM}


class Services:
    """The balancing table of the ward's tenant, carried out at once."""

    def __init__(self, ward: PolicyTestbed) -> None:
        self._ward = ward
        self._table = BalancingTable(TENANT)

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
        self._ward.datapath.apply(self._table.refresh())  # type: ignore[arg-type]  # a service part is a part

    def remove(self, name: str = "web") -> None:
        self._table.remove(name)
        self._ward.datapath.apply(self._table.refresh())  # type: ignore[arg-type]  # a service part is a part

    @property
    def parts(self) -> set[StateItem]:
        return set(self._table.parts())


@pytest.fixture
def services(ward: PolicyTestbed) -> Services:
    """Nothing is served yet. Without an address of its own the kernel tells nobody of v6 that they are refused."""
    ward.datapath.apply(Difference((GATEWAY,), ()))
    return Services(ward)


@contextmanager
def answering(pods: Sequence[Pod], protocol: int, *, family: int) -> Iterator[dict[socket.socket, Pod]]:
    """Sockets of the pods where the service's connections should end."""
    with ExitStack() as closing:
        ears = {}
        for pod in pods:
            ear = closing.enter_context(pod.open_socket(family, KINDS[protocol], port=TARGET_PORT))
            if protocol == TCP:
                ear.listen(64)
            ears[ear] = pod
        yield ears


def heard(ears: dict[socket.socket, Pod]) -> socket.socket:
    """One of those that have been asked; somebody must be."""
    found, _, _ = select.select(list(ears), [], [], DEADLINE)
    assert found, "nobody was asked"
    ear: socket.socket = found[0]
    return ear


def ask(client: Pod, ears: dict[socket.socket, Pod], protocol: int, *, family: int) -> tuple[Pod, Address]:
    """Ask the service once by a socket of its own: who was asked, and by whom; the answer has come from the service."""
    where = (str(VIPS[family]), PORT)
    with client.open_socket(family, KINDS[protocol]) as caller:
        if protocol == UDP:
            caller.sendto(b"?", where)
            ear = heard(ears)
            _, source = ear.recvfrom(64)
            ear.sendto(b"!", source)
        else:
            assert caller.connect_ex(where) in (0, errno.EINPROGRESS)
            ear = heard(ears)
            connection, source = ear.accept()
            with connection:
                connection.sendall(b"!")
        assert select.select([caller], [], [], DEADLINE)[0], "no answer came"
        answer, origin = caller.recvfrom(64)
        assert answer == b"!"
        if protocol == UDP:
            assert origin[:2] == where
        return ears[ear], parse_address(source[0], field="source")


def refused(client: Pod, protocol: int, *, family: int, port: int = PORT) -> bool:
    """Whether the client is told at once that nobody is there."""
    with client.open_socket(family, KINDS[protocol]) as caller:
        started = caller.connect_ex((str(VIPS[family]), port))
        if protocol == UDP:
            caller.send(b"?")
        else:
            assert started == errno.EINPROGRESS
        poll = select.poll()
        poll.register(caller, select.POLLERR | select.POLLHUP)
        assert poll.poll(DEADLINE * 1000), "nothing was told"
        return caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_a_service_balances_over_its_backends(
    ward: PolicyTestbed, services: Services, family: int, protocol: int
) -> None:
    """S1: every backend gets its share, sees who really asks, and answers as the service."""
    client, *backends = (ward.pod(number) for number in range(1, 5))
    services.put(family, protocol, backends)
    with answering(backends, protocol, family=family) as ears:
        asked = [ask(client, ears, protocol, family=family) for _ in range(90)]
    assert {source for _, source in asked} == {client.address(family)}
    shares = Counter(pod.number for pod, _ in asked)
    assert len(shares) == 3
    assert min(shares.values()) >= 10  # by lot it is 30: fewer than 10 come once in a million times


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_a_pod_reaches_itself_through_a_service(
    ward: PolicyTestbed, services: Services, family: int, protocol: int
) -> None:
    pod = ward.pod(1)
    services.put(family, protocol, [pod])
    with answering([pod], protocol, family=family) as ears:
        asked, source = ask(pod, ears, protocol, family=family)
    assert asked is pod
    assert source != pod.address(family)


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_who_asks_in_vain_is_told_at_once(ward: PolicyTestbed, services: Services, family: int, protocol: int) -> None:
    """A service without backends, and a port that a service has not."""
    client, backend = ward.pod(1), ward.pod(2)
    services.put(family, protocol, [])
    assert refused(client, protocol, family=family)
    services.put(family, protocol, [backend])
    assert refused(client, protocol, family=family, port=PORT + 1)
    with answering([backend], protocol, family=family) as ears:
        assert ask(client, ears, protocol, family=family)[0] is backend


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_a_client_stays_with_its_backend(ward: PolicyTestbed, services: Services, family: int, protocol: int) -> None:
    """Session affinity: whoever comes and goes, until its own backend goes."""
    client, *backends = (ward.pod(number) for number in range(1, 6))
    services.put(family, protocol, backends[:3], affinity=600)
    with answering(backends, protocol, family=family) as ears:
        first, _ = ask(client, ears, protocol, family=family)
        for pool in (backends, [first, backends[3]], [first], backends):
            services.put(family, protocol, pool, affinity=600)
            assert {ask(client, ears, protocol, family=family)[0].number for _ in range(5)} == {first.number}
        others = [pod for pod in backends if pod is not first]
        services.put(family, protocol, others, affinity=600)
        second = {ask(client, ears, protocol, family=family)[0].number for _ in range(5)}
        assert len(second) == 1
        assert second < {pod.number for pod in others}


@pytest.mark.parametrize("affinity", [0, 600])
def test_nobody_is_turned_away_while_backends_come_and_go(
    ward: PolicyTestbed, services: Services, affinity: int
) -> None:
    """S3: every connection finds a backend, whatever changes under it."""
    client, *backends = (ward.pod(number) for number in range(1, 5))
    services.put(4, TCP, backends, affinity=affinity)
    done = threading.Event()

    def change() -> None:
        for number in itertools.count(1):
            if done.is_set():
                return
            services.put(4, TCP, backends[: number % 3 + 1], affinity=affinity)

    with ThreadPoolExecutor(1) as other, answering(backends, TCP, family=4) as ears:
        changing = other.submit(change)
        try:
            for _ in range(300):
                ask(client, ears, TCP, family=4)
        finally:
            done.set()
        changing.result(DEADLINE)


def test_a_silent_client_is_forgotten_in_time(ward: PolicyTestbed, services: Services) -> None:
    client, *backends = (ward.pod(number) for number in range(1, 10))
    services.put(4, UDP, backends, affinity=1)
    with answering(backends, UDP, family=4) as ears:
        met: set[int] = set()
        deadline = time.monotonic() + DEADLINE
        while len(met) < 2 and time.monotonic() < deadline:
            met.add(ask(client, ears, UDP, family=4)[0].number)
            select.select([], [], [], 1.2)
    assert len(met) == 2


@pytest.mark.parametrize("family", [4, 6])
def test_a_flow_of_udp_leaves_a_backend_that_is_gone(ward: PolicyTestbed, services: Services, family: int) -> None:
    """A client that never stops sending from one socket is not bound to its first backend for ever."""
    client, one, two = (ward.pod(number) for number in range(1, 4))
    where = (str(VIPS[family]), PORT)
    with (
        answering([one, two], UDP, family=family) as ears,
        client.open_socket(family, socket.SOCK_DGRAM) as caller,
    ):
        for backend in (one, two, one):
            services.put(family, UDP, [backend])
            caller.sendto(b"?", where)
            ear = heard(ears)
            assert ears[ear] is backend
            ear.recvfrom(64)


@pytest.mark.parametrize("family", [4, 6])
def test_a_flow_of_udp_follows_a_backend_to_another_port(ward: PolicyTestbed, services: Services, family: int) -> None:
    """The backend is the same pod as before, and yet another one."""
    client, backend = ward.pod(1), ward.pod(2)
    where = (str(VIPS[family]), PORT)
    with client.open_socket(family, socket.SOCK_DGRAM) as caller:
        for port in (8080, 9090, 8080):
            services.put(family, UDP, [backend], target_port=port)
            with backend.open_socket(family, socket.SOCK_DGRAM, port=port) as ear:
                ear.settimeout(DEADLINE)
                caller.sendto(b"?", where)
                assert ear.recv(64) == b"?"


@pytest.mark.parametrize("family", [4, 6])
def test_a_flow_of_udp_leaves_a_backend_that_went_unseen(ward: PolicyTestbed, services: Services, family: int) -> None:
    """The same when it went while no agent was there."""
    client, one, two = (ward.pod(number) for number in range(1, 4))
    where = (str(VIPS[family]), PORT)
    services.put(family, UDP, [one])
    with (
        answering([one, two], UDP, family=family) as ears,
        client.open_socket(family, socket.SOCK_DGRAM) as caller,
    ):
        caller.sendto(b"?", where)
        heard(ears).recvfrom(64)
        ward.restart()
        other = BalancingTable(TENANT)
        other.put("web", {FrontendKey(VIPS[family], UDP, PORT): pool_of([Target(two.address(family), TARGET_PORT)])})
        other.refresh()
        ward.datapath.converge(ward.parts([client, one, two]) | set(other.parts()) | {GATEWAY})
        caller.sendto(b"?", where)
        assert ears[heard(ears)] is two


@pytest.mark.parametrize("family", [4, 6])
def test_uses_are_counted_by_client_and_provider(ward: PolicyTestbed, services: Services, family: int) -> None:
    """W45: in both directions, with every address in its place."""
    client, backend = ward.pod(1), ward.pod(2)
    services.put(family, UDP, [backend])
    with answering([backend], UDP, family=family) as ears:
        for _ in range(3):
            ask(client, ears, UDP, family=family)
    (use,) = ward.datapath.service_uses()
    assert (use.tenant, use.client, use.provider) == (TENANT, client.address(family), backend.address(family))
    assert use.front == FrontendKey(VIPS[family], UDP, PORT)
    assert use.packets_in == use.packets_out == 3
    assert use.octets_in == use.octets_out == 3 * (29 if family == 4 else 49)


def test_a_ping_of_a_service_is_refused_at_once(ward: PolicyTestbed, services: Services) -> None:
    """An address that is nothing but fronts answers no echo: who asks is told so."""
    client, backend = ward.pod(1), ward.pod(2)
    services.put(4, TCP, [backend])
    with client.open_socket(4, socket.SOCK_RAW, ICMP) as caller:
        caller.sendto(struct.pack(">BBHHH", 8, 0, 0xF7FD, 1, 1), (str(VIPS[4]), 0))
        assert select.select([caller], [], [], DEADLINE)[0]
        assert caller.recv(256)[20] == 3


@pytest.mark.parametrize("family", [4, 6])
def test_policy_judges_who_answers_in_the_end(ward: PolicyTestbed, services: Services, family: int) -> None:
    """The port that rules speak about is the backend's, whatever that of the service is."""
    client, backend = ward.pod(1), ward.pod(2)
    everything = row(Direction.INGRESS, backend, None, DENY)
    ward.put(everything, row(Direction.INGRESS, backend, client, ALLOW, protocol=TCP, ports=(TARGET_PORT, TARGET_PORT)))
    services.put(family, TCP, [backend])
    with answering([backend], TCP, family=family) as ears:
        assert ask(client, ears, TCP, family=family)[0] is backend
        ward.drop(row(Direction.INGRESS, backend, client, ALLOW, protocol=TCP, ports=(TARGET_PORT, TARGET_PORT)))
        ward.put(row(Direction.INGRESS, backend, client, ALLOW, protocol=TCP, ports=(PORT, PORT)))
        with client.open_socket(family, socket.SOCK_STREAM) as caller:
            caller.connect_ex((str(VIPS[family]), PORT))
            (ear,) = ears
            assert ward.fate(ear, client.address(family)) == DENY


def test_a_service_that_is_gone_is_unreachable(ward: PolicyTestbed, services: Services) -> None:
    """S7: nothing of it is left in the kernel."""
    client, backend = ward.pod(1), ward.pod(2)
    for protocol in (TCP, UDP, SCTP):
        services.put(4, protocol, [backend], affinity=60, name=str(protocol))
    wanted = {entry for part in services.parts for entry in service_entries(part)}  # type: ignore[arg-type]
    assert wanted <= ward.space.table.read()
    for protocol in (TCP, UDP, SCTP):
        services.remove(str(protocol))
    assert not wanted & ward.space.table.read()
    with client.open_socket(4, socket.SOCK_STREAM) as caller:
        caller.connect_ex((str(VIPS[4]), PORT))
        poll = select.poll()
        poll.register(caller, select.POLLERR)
        assert poll.poll(DEADLINE * 1000)
        assert caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (errno.ENETUNREACH, errno.EHOSTUNREACH)


def test_services_are_found_again_and_mended(ward: PolicyTestbed, services: Services) -> None:
    """S6: a process with no memory mends what differs, and flows go on."""
    client, backend = ward.pod(1), ward.pod(2)
    services.put(4, TCP, [backend])
    wanted = ward.parts([client, backend]) | services.parts | {GATEWAY}
    ward.restart()
    assert ward.datapath.converge(wanted).repaired == ()
    ward.space.nftables.run("flush table inet weft; flush map inet weft services4; flush map inet weft spreads4")
    assert ward.datapath.converge(wanted).repaired
    with answering([backend], TCP, family=4) as ears:
        assert ask(client, ears, TCP, family=4)[0] is backend


def test_a_table_made_anew_gets_everything_back(
    ward: PolicyTestbed, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else has changed it, and yet nothing of what it had is taken for granted."""
    client, backend = ward.pod(1), ward.pod(2)
    services.put(4, TCP, [backend])
    deny = row(Direction.INGRESS, backend, None, DENY)
    ward.put(deny)
    wanted = ward.parts([client, backend], [deny]) | services.parts | {GATEWAY}
    ward.datapath.converge(wanted)
    assert ward.datapath.converge(wanted).repaired == ()
    monkeypatch.setattr(table, "BASE", "add rule inet weft nowhere drop\n")
    assert ward.datapath.converge(wanted).repaired
    with client.open_socket(4, socket.SOCK_STREAM) as caller, answering([backend], TCP, family=4) as ears:
        caller.connect_ex((str(VIPS[4]), PORT))
        (ear,) = ears
        assert ward.fate(ear, client.address(4)) == DENY
