"""Limits and diversions, judged by `tc`, by what really comes through, and read back by ourselves."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from weft.domain.addresses import parse_address
from weft.kernel.netlink.link import LOOPBACK, Device, alter_link, create_ifb, create_veth, delete_link
from weft.kernel.netlink.route import LinkAddress, Prefix, put_address
from weft.kernel.netlink.tc import (
    IngressRedirect,
    Limit,
    drop_diversion,
    put_diversion,
    put_limit,
    read_diversions,
    read_limits,
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
    """A pod `there` with a port and two devices to divert it into `here`."""
    here.send(
        create_veth(Device(name="wp1", index=PORT), Device(name="eth0", index=200), peer_namespace=there.namespace.fd),
        create_ifb(Device(name="wi1", index=METER)),
        create_ifb(Device(name="wi2", index=OTHER_METER)),
        *(alter_link(index, up=True) for index in (PORT, METER, OTHER_METER)),
        put_address(LinkAddress(link=PORT, prefix=Prefix(parse_address("10.0.0.1", field="here"), 24))),
    )
    there.send(
        alter_link(LOOPBACK, up=True),
        alter_link(200, up=True),
        put_address(LinkAddress(link=200, prefix=Prefix(parse_address("10.0.0.2", field="there"), 24))),
    )
    return there


def queue_of(space: TenantNetns, name: str) -> Any:
    """The queue at a device's exit, with what has passed it."""
    (queue,) = (each for each in space.ask("tc", "-s", "-j", "qdisc", "show", "dev", name) if each.get("root"))
    return queue


def tc(space: TenantNetns, command: str) -> None:
    space.ask("tc", *command.split())


def redirections(space: TenantNetns) -> list[str]:
    filters = space.ask("tc", "-j", "filter", "show", "dev", "wp1", "ingress")
    return [action["to_dev"] for each in filters for action in each.get("options", {}).get("actions", ())]


@contextmanager
def conversation(
    source: TenantNetns, target: TenantNetns, address: str
) -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        target.namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM) as listener,
        source.namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM) as mouth,
    ):
        listener.bind((address, 0))
        listener.listen()
        mouth.settimeout(DEADLINE)
        mouth.connect(listener.getsockname())
        ear, _ = listener.accept()
        ear.settimeout(DEADLINE)
        with ear:
            yield mouth, ear


def megabits_per_second(source: TenantNetns, target: TenantNetns, address: str, *, size: int) -> float:
    """How fast this many bytes came through, from the first one sent to the last one received."""
    with conversation(source, target, address) as (mouth, ear):
        sending = threading.Thread(target=lambda: mouth.sendall(bytes(size)))
        begun = time.monotonic()
        sending.start()
        left = size
        while left:
            left -= len(ear.recv(1 << 20))
        took = time.monotonic() - begun
        sending.join()
    return size * 8 / took / 1e6


def test_a_limit_is_what_tc_calls_a_token_bucket(here: TenantNetns, pod: TenantNetns) -> None:
    here.send(put_limit(Limit(link=METER, rate=50 * MEGABIT, burst=BURST)))
    queue = queue_of(here, "wi1")
    assert (queue["kind"], queue["handle"]) == ("tbf", "57:")
    assert queue["options"]["rate"] == 50 * MEGABIT
    assert queue["options"]["burst"] == pytest.approx(BURST, abs=64)
    assert queue["options"]["lat"] == pytest.approx(50_000, abs=100)


@pytest.mark.parametrize("rate", [128, 125_000, 50 * MEGABIT, (1 << 32) - 1, 1 << 32, 10**12, 10**18])
@pytest.mark.parametrize("burst", [2048, BURST, 10_486 << 10, 1 << 28])
def test_what_is_read_is_what_was_put(here: TenantNetns, pod: TenantNetns, rate: int, burst: int) -> None:
    limit = Limit(link=METER, rate=rate, burst=burst)
    here.send(put_limit(limit))
    assert read_limits(here.route) == [limit]


def test_a_limit_is_changed_in_place(here: TenantNetns, pod: TenantNetns) -> None:
    """What it has counted is still there, so what waited in it is too."""
    here.send(put_limit(Limit(link=METER, rate=50 * MEGABIT, burst=BURST)))
    here.send(*put_diversion(IngressRedirect(link=PORT, into=METER)))
    megabits_per_second(pod, here, "10.0.0.1", size=100_000)
    before = queue_of(here, "wi1")["bytes"]
    assert before > 100_000
    here.send(put_limit(Limit(link=METER, rate=80 * MEGABIT, burst=2 * BURST)))
    after = queue_of(here, "wi1")
    assert after["options"]["rate"] == 80 * MEGABIT
    assert after["bytes"] >= before


def test_a_limit_takes_the_place_of_another_kind_of_queue(here: TenantNetns, pod: TenantNetns) -> None:
    tc(here, "qdisc add dev wi1 root handle 1: tbf rate 1mbit burst 9kb lat 1s")
    assert read_limits(here.route) == [], "it is not ours"
    limit = Limit(link=METER, rate=MEGABIT, burst=BURST)
    here.send(put_limit(limit))
    assert read_limits(here.route) == [limit]


def test_a_diversion_goes_elsewhere_or_away_and_both_again(here: TenantNetns, pod: TenantNetns) -> None:
    assert read_diversions(here.route) == []
    for into, name in ((METER, "wi1"), (METER, "wi1"), (OTHER_METER, "wi2")):
        diversion = IngressRedirect(link=PORT, into=into)
        here.send(*put_diversion(diversion))
        assert redirections(here) == [name]
        assert read_diversions(here.route) == [diversion]
    for _ in range(2):
        here.send(drop_diversion(PORT))
        assert read_diversions(here.route) == []
    assert [each["kind"] for each in here.ask("tc", "-j", "qdisc", "show", "dev", "wp1")] == ["noqueue"]


def test_a_diversion_into_a_device_that_is_gone_leads_nowhere(here: TenantNetns, pod: TenantNetns) -> None:
    here.send(*put_diversion(IngressRedirect(link=PORT, into=METER)), delete_link(METER))
    assert read_diversions(here.route) == [IngressRedirect(link=PORT, into=0)]


def test_a_device_that_is_gone_has_no_diversion(here: TenantNetns, pod: TenantNetns) -> None:
    here.send(delete_link(PORT))
    here.send(drop_diversion(PORT))
    assert read_diversions(here.route) == []


def test_others_filters_are_no_diversions(here: TenantNetns, pod: TenantNetns) -> None:
    tc(here, "qdisc add dev wp1 ingress")
    tc(here, "filter add dev wp1 ingress protocol ip prio 9 u32 match u32 0 0 action mirred egress mirror dev wi1")
    assert read_diversions(here.route) == []


def test_what_comes_out_of_a_pod_is_as_fast_as_asked_for(here: TenantNetns, pod: TenantNetns) -> None:
    """Q2. Never faster; and now and then, when the machine has time for it, not much slower."""
    here.send(put_limit(Limit(link=METER, rate=50 * MEGABIT, burst=BURST)))
    here.send(*put_diversion(IngressRedirect(link=PORT, into=METER)))
    fastest = 0.0
    for _ in range(TRIES):
        measured = megabits_per_second(pod, here, "10.0.0.1", size=4_000_000)
        assert measured < 60
        fastest = max(fastest, measured)
        if fastest > 40:
            return
    pytest.fail(f"50 Mbit/s were asked for, {fastest:.0f} is the most that came")


def test_the_other_way_and_without_a_diversion_nothing_is_limited(here: TenantNetns, pod: TenantNetns) -> None:
    """Q1, Q10: the sender's limit counts."""
    here.send(put_limit(Limit(link=METER, rate=4 * MEGABIT, burst=BURST)))
    here.send(*put_diversion(IngressRedirect(link=PORT, into=METER)))
    assert max(megabits_per_second(here, pod, "10.0.0.2", size=8_000_000) for _ in range(3)) > 8
    here.send(drop_diversion(PORT))
    assert max(megabits_per_second(pod, here, "10.0.0.1", size=8_000_000) for _ in range(3)) > 8
