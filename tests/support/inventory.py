"""The actual state of a lab, read with `ip`, `nft`, `ovs-ofctl`, the backup and the log file, not with our own code."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.switch_inventory import reachable, spoofguard_sources

from weft.lab.hosts import Host
from weft.lab.netlab import NetLab
from weft.lab.waiting import DEADLINE, eventually

_ANY_NAMESPACE = Path("/proc/self/ns/net")


class Held(NamedTuple):
    """An address in use, with its tenant and host."""

    tenant: str
    address: str
    host: str


def run_json(namespace: Path, *command: str) -> Any:
    """Run a command in a network namespace and return its JSON output; it must succeed.

    `FileNotFoundError` if the namespace does not exist, as after the last DEL of a tenant, or is not mounted yet.
    It is opened before the command runs: after a failure the path may be that of a new namespace.
    """
    with namespace.open("rb") as opened:
        number = opened.fileno()
        if os.fstat(number).st_dev != _ANY_NAMESPACE.stat().st_dev:
            raise FileNotFoundError(f"{namespace} is not mounted yet")
        inside = ["nsenter", f"--net=/proc/self/fd/{number}", "--", *command]
        done = subprocess.run(inside, capture_output=True, check=False, timeout=DEADLINE, pass_fds=[number])
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.decode()}"
    return json.loads(done.stdout or b"[]")


def run(namespace: Path, command: str) -> None:
    """Run a command in a network namespace, for example to cause drift; it must succeed."""
    subprocess.run(["nsenter", f"--net={namespace}", "--", *command.split()], check=True, timeout=DEADLINE)


def tenant_netns(host: Host) -> dict[str, Path]:
    """The tenant netns of a host, by tenant."""
    return {name: host.tenants.path / name for name in sorted(host.tenants.names())}


def devices(namespace: Path) -> set[str]:
    """The devices in a namespace besides loopback."""
    return {each["ifname"] for each in run_json(namespace, "ip", "-j", "link")} - {"lo"}


def addresses(namespace: Path) -> set[str]:
    """The local addresses of a namespace."""
    shown = run_json(namespace, "ip", "-j", "address")
    return {each["local"] for device in shown for each in device.get("addr_info", ())}


def routed(host: Host) -> set[Held]:
    """The addresses that a host forwards to a local port, routed or bridged."""
    if host.switch is not None:
        return {Held(tenant, address, host.name) for tenant, address in reachable(host.switch)}
    return {
        Held(tenant, address, host.name)
        for tenant, netns in tenant_netns(host).items()
        for address in (*_routed_in(netns), *_bridged_in(netns))
    }


def _routed_in(netns: Path) -> Iterator[str]:
    for family in ("-4", "-6"):
        for route in run_json(netns, "ip", "-j", family, "route"):
            if route.get("dev", "").startswith("wp") and route["dst"][:4] not in {"fe80", "ff00"}:
                yield route["dst"]


def _bridged_in(netns: Path) -> Iterator[str]:
    """Neighbours on a bridge with an FDB entry of a local port."""
    entries = run_json(netns, "bridge", "-j", "fdb")
    macs = {each["mac"] for each in entries if each["ifname"].startswith("wp") and each["state"] == "static"}
    for each in run_json(netns, "ip", "-j", "neigh", "show", "nud", "permanent"):
        if each["dev"].startswith("wb") and each.get("lladdr") in macs:
            yield each["dst"]


def spoofguard_addresses(host: Host) -> list[Held]:
    """The source addresses that the anti-spoofing rules of a host allow, once per port."""
    if host.switch is not None:
        return [Held(tenant, address, host.name) for tenant, address in spoofguard_sources(host.switch)]
    return [
        Held(tenant, address, host.name)
        for tenant, netns in tenant_netns(host).items()
        for address in _elements(run_json(netns, "nft", "-j", "list", "ruleset"))
    ]


def stored(entries: dict[str, Any]) -> set[Held]:
    """The addresses of all endpoints in a backup document."""
    endpoints = [document["o"] for key, document in entries.items() if key.startswith("endpoints/")]
    return {
        Held(each["tenantName"], each[member], each.get("homingHost", ""))
        for each in endpoints
        for member in ("ipAddress", "ipv6Address")
        if each.get(member)
    }


def logged(host: Host) -> set[Held]:
    """The addresses of all attachments in a host's attachment log."""
    attachments: dict[str, Any] = {}
    for line in (host.home / "data" / "attachments.log").read_text().splitlines()[1:]:
        written = json.loads(line.partition(" ")[2])
        attachments[json.dumps(written["key"])] = written.get("attachment")
    return {
        Held(attachment["endpoint"]["tenantName"], attachment["endpoint"][member], host.name)
        for attachment in attachments.values()
        if attachment is not None
        for member in ("ipAddress", "ipv6Address")
        if attachment["endpoint"].get(member)
    }


async def differences(lab: NetLab) -> list[str]:
    """The differences between kernel, rules, attachment log and store; empty if they agree."""
    documents = stored(await lab.rest.state())
    found = []
    for host in lab.hosts.values():
        expected = {held for held in documents if held.host == host.name}
        for what, actual in (
            ("routed", routed(host)),
            ("allowed", set(spoofguard_addresses(host))),
            ("logged", logged(host)),
        ):
            if actual != expected:
                found.append(
                    f"{host.name}: {what} but not stored {actual - expected}, stored but not {what} {expected - actual}"
                )
    allocated = [(held.tenant, held.address) for held in documents]
    if len(allocated) != len(set(allocated)):
        found.append(f"allocated twice: {sorted(each for each in set(allocated) if allocated.count(each) > 1)}")
    return found


async def wait_consistent(lab: NetLab) -> None:
    """Wait until kernel, rules, attachment log and store agree."""

    async def read() -> list[str]:
        try:
            return await differences(lab)
        except FileNotFoundError as error:  # the namespace is being deleted
            return [str(error)]

    await eventually(read, lambda found: not found)


def _elements(objects: dict[str, Any]) -> Iterator[str]:
    for each in objects["nftables"]:
        listed = each.get("set", {})
        if listed.get("name", "") in {"l3_spoofguard4", "l3_spoofguard6", "l2_spoofguard4", "l2_spoofguard6"}:
            addresses = (str(element["concat"][-1]) for element in listed.get("elem", ()))
            yield from (address for address in addresses if not address.startswith("fe80"))  # link-local addresses
