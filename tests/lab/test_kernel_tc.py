"""Rate limits (tbf) and ingress redirects (mirred), compared with `tc`, measured with packets, and read back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from weft.domain.addresses import parse_address
from weft.kernel.netlink.link import LOOPBACK_IFINDEX, Device, change_link, create_ifb, create_veth, delete_link
from weft.kernel.netlink.route import LinkAddress, Prefix, put_address
from weft.kernel.netlink.tc import (
    IngressRedirect,
    Limit,
    drop_redirect,
    put_limit,
    put_redirect,
    read_limits,
    read_redirects,
)
from weft.lab.servers.processes import DEADLINE

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns

PORT, METER, OTHER_METER = 100, 101, 102
MEGABIT = 1_000_000 // 8
BURST = 64 << 10
TRIES = 8


@pytest.fixture
def pod(here: TenantNetns, there: TenantNetns) -> TenantNetns:
    """A pod `there`, with its host-side port and two redirect targets `here`."""
    here.send(
        create_veth(Device(name="wp1", index=PORT), Device(name="eth0", index=200), peer_namespace=there.namespace.fd),
        create_ifb(Device(name="wi1", index=METER)),
        create_ifb(Device(name="wi2", index=OTHER_METER)),
        *(change_link(index, up=True) for index in (PORT, METER, OTHER_METER)),
        put_address(LinkAddress(link=PORT, prefix=Prefix(parse_address("10.0.0.1", field="here"), 24))),
    )
    there.send(
        change_link(LOOPBACK_IFINDEX, up=True),
        change_link(200, up=True),
        put_address(LinkAddress(link=200, prefix=Prefix(parse_address("10.0.0.2", field="there"), 24))),
    )
    return there


def root_qdisc(netns: TenantNetns, name: str) -> Any:
    """The root qdisc of a device, with its statistics."""
    (queue,) = (each for each in netns.ask("tc", "-s", "-j", "qdisc", "show", "dev", name) if each.get("root"))
    return queue


def tc(netns: TenantNetns, command: str) -> None:
    netns.ask("tc", *command.split())


def redirections(netns: TenantNetns) -> list[str]:
    filters = netns.ask("tc", "-j", "filter", "show", "dev", "wp1", "ingress")
    return [action["to_dev"] for each in filters for action in each.get("options", {}).get("actions", ())]


@contextmanager
def open_connection(
    source: TenantNetns, target: TenantNetns, address: str
) -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        target.namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM) as listener,
        source.namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM) as sender,
    ):
        listener.bind((address, 0))
        listener.listen()
        sender.settimeout(DEADLINE)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
        receiver.settimeout(DEADLINE)
        with receiver:
            yield sender, receiver


def megabits_per_second(source: TenantNetns, target: TenantNetns, address: str, *, size: int) -> float:
    """The throughput of this many bytes, from the first one sent to the last one received."""
    with open_connection(source, target, address) as (sender, receiver):
        sending = threading.Thread(target=lambda: sender.sendall(bytes(size)))
        begun = time.monotonic()
        sending.start()
        remaining = size
        while remaining:
            remaining -= len(receiver.recv(1 << 20))
        took = time.monotonic() - begun
        sending.join()
    return size * 8 / took / 1e6


def test_a_limit_is_a_tbf_qdisc(here: TenantNetns, pod: TenantNetns) -> None:
    here.send(put_limit(Limit(link=METER, rate=50 * MEGABIT, burst=BURST)))
    queue = root_qdisc(here, "wi1")
    assert (queue["kind"], queue["handle"]) == ("tbf", "57:")
    assert queue["options"]["rate"] == 50 * MEGABIT
    assert queue["options"]["burst"] == pytest.approx(BURST, abs=64)
    assert queue["options"]["lat"] == pytest.approx(50_000, abs=100)


@pytest.mark.parametrize("rate", [128, 125_000, 50 * MEGABIT, (1 << 32) - 1, 1 << 32, 10**12, 10**18])
@pytest.mark.parametrize("burst", [2048, BURST, 10_486 << 10, 1 << 28])
def test_limits_are_read_back(here: TenantNetns, pod: TenantNetns, rate: int, burst: int) -> None:
    limit = Limit(link=METER, rate=rate, burst=burst)
    here.send(put_limit(limit))
    assert read_limits(here.route) == [limit]


def test_a_limit_is_changed_in_place(here: TenantNetns, pod: TenantNetns) -> None:
    """Its statistics are kept, so queued packets are too."""
    here.send(put_limit(Limit(link=METER, rate=50 * MEGABIT, burst=BURST)))
    here.send(*put_redirect(IngressRedirect(link=PORT, into=METER)))
    megabits_per_second(pod, here, "10.0.0.1", size=100_000)
    before = root_qdisc(here, "wi1")["bytes"]
    assert before > 100_000
    here.send(put_limit(Limit(link=METER, rate=80 * MEGABIT, burst=2 * BURST)))
    after = root_qdisc(here, "wi1")
    assert after["options"]["rate"] == 80 * MEGABIT
    assert after["bytes"] >= before


def test_a_limit_replaces_a_foreign_qdisc(here: TenantNetns, pod: TenantNetns) -> None:
    tc(here, "qdisc add dev wi1 root handle 1: tbf rate 1mbit burst 9kb lat 1s")
    assert read_limits(here.route) == [], "it is not ours"
    limit = Limit(link=METER, rate=MEGABIT, burst=BURST)
    here.send(put_limit(limit))
    assert read_limits(here.route) == [limit]


def test_a_redirect_is_changed_and_deleted_idempotently(here: TenantNetns, pod: TenantNetns) -> None:
    assert read_redirects(here.route) == []
    for into, name in ((METER, "wi1"), (METER, "wi1"), (OTHER_METER, "wi2")):
        redirect = IngressRedirect(link=PORT, into=into)
        here.send(*put_redirect(redirect))
        assert redirections(here) == [name]
        assert read_redirects(here.route) == [redirect]
    for _ in range(2):
        here.send(drop_redirect(PORT))
        assert read_redirects(here.route) == []
    assert [each["kind"] for each in here.ask("tc", "-j", "qdisc", "show", "dev", "wp1")] == ["noqueue"]


def test_a_redirect_to_a_deleted_device_has_no_target(here: TenantNetns, pod: TenantNetns) -> None:
    here.send(*put_redirect(IngressRedirect(link=PORT, into=METER)), delete_link(METER))
    assert read_redirects(here.route) == [IngressRedirect(link=PORT, into=0)]


def test_a_deleted_device_has_no_redirect(here: TenantNetns, pod: TenantNetns) -> None:
    here.send(delete_link(PORT))
    here.send(drop_redirect(PORT))
    assert read_redirects(here.route) == []


def test_foreign_filters_are_not_read_as_redirects(here: TenantNetns, pod: TenantNetns) -> None:
    tc(here, "qdisc add dev wp1 ingress")
    tc(here, "filter add dev wp1 ingress protocol ip prio 9 u32 match u32 0 0 action mirred egress mirror dev wi1")
    assert read_redirects(here.route) == []


def test_pod_egress_is_limited_to_the_rate(here: TenantNetns, pod: TenantNetns) -> None:
    """Q2. Never faster, and not much slower in at least one try, as the machine may be busy."""
    here.send(put_limit(Limit(link=METER, rate=50 * MEGABIT, burst=BURST)))
    here.send(*put_redirect(IngressRedirect(link=PORT, into=METER)))
    fastest = 0.0
    for _ in range(TRIES):
        measured = megabits_per_second(pod, here, "10.0.0.1", size=4_000_000)
        assert measured < 60
        fastest = max(fastest, measured)
        if fastest > 40:
            return
    pytest.fail(f"the limit is 50 Mbit/s, the highest throughput was {fastest:.0f}")


def test_the_reverse_direction_and_no_redirect_are_not_limited(here: TenantNetns, pod: TenantNetns) -> None:
    """Q1, Q10: the sender's limit applies."""
    here.send(put_limit(Limit(link=METER, rate=4 * MEGABIT, burst=BURST)))
    here.send(*put_redirect(IngressRedirect(link=PORT, into=METER)))
    assert max(megabits_per_second(here, pod, "10.0.0.2", size=8_000_000) for _ in range(3)) > 8
    here.send(drop_redirect(PORT))
    assert max(megabits_per_second(pod, here, "10.0.0.1", size=8_000_000) for _ in range(3)) > 8
