"""Containers of real runtimes: an address on eth0, connectivity, and nothing left after removal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support import inventory
from tests.support.runtimes import Ctr, Podman, Runtime, address_in, fetch_name, running_containerd, running_podman

if TYPE_CHECKING:
    from tests.e2e.conftest import Machine


@pytest.fixture
async def podman(machine: Machine, root: Path) -> AsyncIterator[Podman]:
    async with running_podman(root) as podman:
        yield podman


@pytest.fixture
async def ctr(machine: Machine, root: Path) -> AsyncIterator[Ctr]:
    async with running_containerd(root, home=machine.host.home) as ctr:
        yield ctr


async def attach_and_detach_two(runtime: Runtime, machine: Machine) -> None:
    for name in ("a", "b"):
        await runtime.start(name)
    a, b = await address_in(runtime, "a"), await address_in(runtime, "b")
    assert {a, b} == await machine.used_addresses()
    assert await fetch_name(runtime, "a", b) == "b"
    assert await fetch_name(runtime, "b", a) == "a"
    await runtime.remove("a")
    assert await machine.used_addresses() == {b}
    await runtime.start("c")
    assert await fetch_name(runtime, "b", await address_in(runtime, "c")) == "c"
    for name in ("b", "c"):
        await runtime.remove(name)
    await machine.wait_until_clean()


async def test_containers_of_podman(podman: Podman, machine: Machine) -> None:
    """Podman 4.3 with its CNI backend, which calls VERSION first."""
    await attach_and_detach_two(podman, machine)


async def test_containers_of_ctr(ctr: Ctr, machine: Machine) -> None:
    """`ctr run --cni`: namespaces under /proc, and a DEL without a namespace after the container has exited."""
    await attach_and_detach_two(ctr, machine)


async def test_a_container_of_ctr_whose_add_fails(ctr: Ctr, machine: Machine) -> None:
    """`ctr` uses the first configuration list, exits with our error, and leaves a task that never ran."""
    machine.write_list("00-refused", {"type": "weft-cni", "ipam": {"type": "host-local"}})
    with pytest.raises(AssertionError, match="ended with code 1"):
        await ctr.start("a")
    await machine.wait_until_clean()


async def test_podman_requests_an_ip_and_a_mac(podman: Podman, machine: Machine) -> None:
    """cni 5: they are passed in CNI_ARGS."""
    await podman.start("a", "--ip", "10.224.3.7", "--mac-address", "02:11:22:33:44:55")
    assert await address_in(podman, "a") == "10.224.3.7"
    assert "02:11:22:33:44:55" in (await podman.inside("a", "/bin/ip", "link", "show", "dev", "eth0")).output
    await podman.start("b")
    assert await fetch_name(podman, "b", "10.224.3.7") == "a"
    taken = await podman.try_start("c", "--ip", "10.224.3.7")
    assert taken.exit_code != 0
    assert "10.224.3.7" in taken.output
    for name in ("a", "b"):
        await podman.remove(name)
    await machine.wait_until_clean()


async def test_podman_in_a_chain_with_tuning_and_dns(podman: Podman, machine: Machine) -> None:
    """P-10, P-53: DNS and sysctls of the configuration list are applied in the container."""
    ours = {"type": "weft-cni", "dns": {"nameservers": ["10.224.0.53"], "search": ["blue.example"]}}
    tuning = {"type": "tuning", "sysctl": {"net.ipv4.conf.eth0.log_martians": "1"}}
    machine.write_list("chained", {"type": "loopback"}, ours, tuning)
    for name in ("a", "b"):
        await podman.start(name, network="chained")
    assert await fetch_name(podman, "a", await address_in(podman, "b")) == "b"
    written = (await podman.inside("a", "/bin/cat", "/etc/resolv.conf")).output
    assert "nameserver 10.224.0.53" in written
    assert "blue.example" in written
    setting = await podman.inside("a", "/bin/cat", "/proc/sys/net/ipv4/conf/eth0/log_martians")
    assert setting.output.strip() == "1"
    for name in ("a", "b"):
        await podman.remove(name)
    await machine.wait_until_clean()


async def test_podman_publishes_a_host_port(podman: Podman, machine: Machine) -> None:
    """P-51: a runtime with the capability gets the port, and it is closed with the container."""
    machine.write_list("declared", {"type": "weft-cni", "capabilities": {"portMappings": True}})
    await podman.start("a", "--publish", "18090:8080", network="declared")
    ruleset = inventory.run_json(machine.host.netns, "nft", "-j", "list", "ruleset")["nftables"]
    (ports,) = [each["map"] for each in ruleset if each.get("map", {}).get("name") == "host_ports4"]
    assert [element[0]["concat"] for element in ports["elem"]] == [["tcp", 18090]]
    await podman.remove("a")
    await machine.wait_until_clean()
