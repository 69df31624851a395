"""What a lab really has, read without our own code: by `ip`, `nft`, `ovs-ofctl`, the backup and the ledger's text."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.switch_inventory import heard, reachable

from weft.lab.hosts import Host
from weft.lab.netlab import NetLab
from weft.lab.waiting import DEADLINE, eventually

_ANY_NAMESPACE = Path("/proc/self/ns/net")


class Held(NamedTuple):
    """An address in use: of which tenant, on which host."""

    tenant: str
    address: str
    host: str


def ask(namespace: Path, *command: str) -> Any:
    """What a tool that speaks JSON prints inside a network namespace; it must succeed.

    `FileNotFoundError` when the namespace is gone, as a tenant's is when its last pod leaves, or is only being made.
    It is opened first: whoever looks when a tool has failed may find the next one of its name.
    """
    with namespace.open("rb") as opened:
        number = opened.fileno()
        if os.fstat(number).st_dev != _ANY_NAMESPACE.stat().st_dev:
            raise FileNotFoundError(f"{namespace} is only being made")
        inside = ["nsenter", f"--net=/proc/self/fd/{number}", "--", *command]
        done = subprocess.run(inside, capture_output=True, check=False, timeout=DEADLINE, pass_fds=[number])
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.decode()}"
    return json.loads(done.stdout or b"[]")


def run(namespace: Path, command: str) -> None:
    """Run a tool inside a network namespace, such as to break something there; it must succeed."""
    subprocess.run(["nsenter", f"--net={namespace}", "--", *command.split()], check=True, timeout=DEADLINE)


def spaces(host: Host) -> dict[str, Path]:
    """The namespaces of tenants on a host, by name."""
    return {name: host.tenants.path / name for name in sorted(host.tenants.names())}


def devices(namespace: Path) -> set[str]:
    """The devices in a namespace besides loopback."""
    return {each["ifname"] for each in ask(namespace, "ip", "-j", "link")} - {"lo"}


def addresses(namespace: Path) -> set[str]:
    """The addresses that a namespace has itself."""
    shown = ask(namespace, "ip", "-j", "address")
    return {each["local"] for device in shown for each in device.get("addr_info", ())}


def routed(host: Host) -> set[Held]:
    """The addresses that a host leads to a port of its own, by routes or on segments."""
    if host.switch is not None:
        return {Held(tenant, address, host.name) for tenant, address in reachable(host.switch)}
    return {
        Held(tenant, address, host.name)
        for tenant, space in spaces(host).items()
        for address in (*_routed_in(space), *_bridged_in(space))
    }


def _routed_in(space: Path) -> Iterator[str]:
    for family in ("-4", "-6"):
        for route in ask(space, "ip", "-j", family, "route"):
            if route.get("dev", "").startswith("wp") and route["dst"][:4] not in {"fe80", "ff00"}:
                yield route["dst"]


def _bridged_in(space: Path) -> Iterator[str]:
    """Neighbours on a segment whose frames go to a port."""
    entries = ask(space, "bridge", "-j", "fdb")
    macs = {each["mac"] for each in entries if each["ifname"].startswith("wp") and each["state"] == "static"}
    for each in ask(space, "ip", "-j", "neigh", "show", "nud", "permanent"):
        if each["dev"].startswith("wb") and each.get("lladdr") in macs:
            yield each["dst"]


def allowed_to_speak(host: Host) -> list[Held]:
    """The addresses that a host's rules let through from a port of its own, once for each port."""
    if host.switch is not None:
        return [Held(tenant, address, host.name) for tenant, address in heard(host.switch)]
    return [
        Held(tenant, address, host.name)
        for tenant, space in spaces(host).items()
        for address in _elements(ask(space, "nft", "-j", "list", "ruleset"))
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


def noted(host: Host) -> set[Held]:
    """The addresses of all attachments in a host's ledger."""
    notes: dict[str, Any] = {}
    for line in (host.home / "data" / "ledger").read_text().splitlines()[1:]:
        written = json.loads(line.partition(" ")[2])
        notes[json.dumps(written["key"])] = written.get("note")
    return {
        Held(note["endpoint"]["tenantName"], note["endpoint"][member], host.name)
        for note in notes.values()
        if note is not None
        for member in ("ipAddress", "ipv6Address")
        if note["endpoint"].get(member)
    }


async def differences(lab: NetLab) -> list[str]:
    """Where kernel, rules, ledger and store do not say the same; nothing when they agree."""
    documents = stored(await lab.rest.state())
    found = []
    for host in lab.hosts.values():
        mine = {held for held in documents if held.host == host.name}
        for what, others in (
            ("routed", routed(host)),
            ("allowed", set(allowed_to_speak(host))),
            ("noted", noted(host)),
        ):
            if others != mine:
                found.append(
                    f"{host.name}: {what} but not stored {others - mine}, stored but not {what} {mine - others}"
                )
    given = [(held.tenant, held.address) for held in documents]
    if len(given) != len(set(given)):
        found.append(f"given twice: {sorted(each for each in set(given) if given.count(each) > 1)}")
    return found


async def settled(lab: NetLab) -> None:
    """Return when kernel, rules, ledger and store agree."""

    async def look() -> list[str]:
        try:
            return await differences(lab)
        except FileNotFoundError as error:  # it is just going
            return [str(error)]

    await eventually(look, lambda found: not found)


def _elements(objects: dict[str, Any]) -> Iterator[str]:
    for each in objects["nftables"]:
        listed = each.get("set", {})
        if listed.get("name", "") in {"ports4", "ports6", "stations4", "stations6"}:
            addresses = (str(element["concat"][-1]) for element in listed.get("elem", ()))
            yield from (address for address in addresses if not address.startswith("fe80"))  # of the kernel's own
