"""The checks of `weft doctor`: each looks at one thing, and says what to do when it is not well."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from weft.cni.chains import read_chains
from weft.cni.errors import CniError
from weft.cni.install import NAMES
from weft.cni.wire import HEADER_SIZE, Answer, Call, Unreadable, body_size, decode_answer, encode_call
from weft.ctl.failures import Failure
from weft.ctl.weft import mtu_probe
from weft.ctl.weft.agent_client import inspect_agent
from weft.domain.errors import WeftError
from weft.ports.datapath import DatapathTools

_ENCAPSULATION = {4: 50, 6: 70}
_SMALL_PACKET = 100
_AT_ONCE = 16
_MENDS = "netplugin mends this by itself within a minute; if it stays, see its log"
_STATUS = b'{"cniVersion":"1.1.0","name":"weft","type":"weft-cni"}'


class Health(StrEnum):
    """How a thing is. A warning is worth a look and stops nothing by itself."""

    WELL = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Check(NamedTuple):
    """What was looked at, how it is, and what to do about it."""

    name: str
    health: Health
    text: str
    hint: str = ""


def _verdict(name: str, faults: list[str], *, well: str, hint: str, health: Health = Health.FAILED) -> Iterator[Check]:
    if not faults:
        yield Check(name, Health.WELL, well)
    for fault in faults:
        yield Check(name, health, fault, hint)


def examine(agent: str, tools: DatapathTools, *, conf_dir: Path, switch: Path, within: float) -> Iterator[Check]:
    """All checks, those of the machine first. What needs an agent that is away is left out."""
    yield from check_machine(tools)
    yield from check_switch(tools, switch)
    yield from check_networks(conf_dir)
    try:
        node = inspect_agent(agent)
    except Failure as failure:
        yield Check("agent", Health.FAILED, failure.message, "start netplugin, or see its log")
        return
    yield from check_agent(node)
    yield from check_cni(Path(node["cniSocket"]), within=within)
    yield from check_names(node)
    yield from check_spaces(node)
    yield from check_peers(node, within=within)


def check_machine(tools: DatapathTools) -> Iterator[Check]:
    """Whether the kernel does what we need, and whether others stand in our way."""
    try:
        lacking, hazards = tools.probe(), tools.hazards()
    except WeftError as error:
        yield Check("kernel", Health.FAILED, error.message, "run weft doctor as root")
        return
    yield from _verdict(
        "kernel",
        lacking,
        well="veth, vxlan and nftables work",
        hint="load the modules veth, vxlan, nf_tables and nft_fwd_netdev, and macvlan for Open vSwitch",
    )
    yield from _verdict(
        "firewall",
        hazards,
        well="no foreign chain drops by default",
        hint="see that it lets the tunnels' UDP port in, and what is forwarded for workloads",
        health=Health.WARNING,
    )


def check_switch(tools: DatapathTools, switch: Path) -> Iterator[Check]:
    """Whether the switch, where the datapath needs one, is there and as it must be."""
    for found in tools.examine(switch):
        health = Health.WELL if not found.remedy else Health.FAILED if found.stops_us else Health.WARNING
        yield Check(found.name, health, found.text, found.remedy)


def check_networks(conf_dir: Path) -> Iterator[Check]:
    """Whether the runtimes' lists of plugins can work with ours in them."""
    try:
        chains = [chain for chain in read_chains(conf_dir) if chain.names(NAMES)]
    except OSError as error:
        yield Check("networks", Health.FAILED, f"{conf_dir} cannot be read: {error}", "run weft doctor as root")
        return
    yield from _verdict(
        "networks",
        [fault for chain in chains if (fault := chain.fault(NAMES))],
        well=f"{len(chains)} networks in {conf_dir} call our plugin",
        hint="take them out of the list: no port is mapped, no rate limited and no packet filtered by them",
    )


def check_agent(node: Mapping[str, Any]) -> Iterator[Check]:
    """Whether the agent is ready and hears the store."""
    name, count = node["node"], len(node["ports"])
    yield from _verdict(
        "agent", list(node["reasons"]), well=f"{name} is ready with {count} workloads", hint="see the log of netplugin"
    )
    store = [] if node["storeInTouch"] else ["the store does not hear this node"]
    yield from _verdict(
        "store",
        store,
        well=f"in touch, revision {node['realisedRevision']} is in force",
        hint="see that netmaster or etcd runs and is reached from here (--netmaster, --etcd-endpoints)",
    )


def check_spaces(node: Mapping[str, Any]) -> Iterator[Check]:
    """Whether the tenants' spaces are as they should be, and the kernel and the ledger agree."""
    faults = [f"tenant {space['tenant']}: {fault}" for space in node["spaces"] for fault in space["faults"]]
    yield from _verdict("spaces", faults, well=f"{len(node['spaces'])} tenants are as they should be", hint=_MENDS)
    yield from _verdict("leaks", list(node["leaks"]), well="kernel and ledger agree", hint=_MENDS)


def check_names(node: Mapping[str, Any]) -> Iterator[Check]:
    """Whether netdns is there and follows the agent; what it was told before it goes on answering."""
    if node["names"] != "off":
        yield from _verdict(
            "names",
            ["netdns does not follow the agent"] if node["names"] == "away" else [],
            well="netdns answers for every tenant here",
            hint="start netdns, or see its log; without names give netplugin --names-socket none",
        )


def check_cni(path: Path, *, within: float) -> Iterator[Check]:
    """Whether runtimes are answered on the agent's socket."""
    call = Call(environment={"CNI_COMMAND": "STATUS"}, stdin=_STATUS, deadline=within)
    try:
        answer = _call(path, call, within=within)
    except (OSError, Unreadable) as error:
        yield Check("cni", Health.FAILED, f"{path} does not answer: {error}", "see the log of netplugin")
        return
    error_object = CniError.decode(answer.stdout) if answer.exit_code else None
    faults = [error_object.message if error_object else "STATUS was refused"] if answer.exit_code else []
    yield from _verdict("cni", faults, well=f"{path} answers", hint="see the log of netplugin")


def _call(path: Path, call: Call, *, within: float) -> Answer:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(within)
        connection.connect(str(path))
        connection.sendall(encode_call(call))
        with connection.makefile("rb") as reader:
            return decode_answer(reader.read(body_size(reader.read(HEADER_SIZE))))


def check_peers(node: Mapping[str, Any], *, within: float) -> Iterator[Check]:
    """Whether full packets of workloads get to every other node uncut."""
    own = str(node["vtepIp"])
    size = int(node["mtu"]) + _ENCAPSULATION[ip_address(own).version]
    peers = [peer for peer in node["peers"] if peer["vtepIp"]]
    if ip_address(own).is_loopback and peers:
        yield Check("tunnels", Health.FAILED, f"our tunnels end at {own}", "give netplugin --vtep-ip")
        return
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as threads:
        yield from threads.map(partial(_check_peer, own, size, within), peers)


def _check_peer(own: str, size: int, within: float, peer: Mapping[str, Any]) -> Check:
    name = f"peer {peer['node']}"
    if peer["state"] == "silent":
        return Check(name, Health.WARNING, "its agent is silent", "see netplugin on that machine")
    target = str(peer["vtepIp"])
    try:
        if mtu_probe.answers(target, size=size, source=own, within=within):
            return Check(name, Health.WELL, f"packets of {size} bytes reach {target} uncut")
        small = mtu_probe.answers(target, size=_SMALL_PACKET, source=own, within=within)
    except OSError as error:
        return Check(name, Health.FAILED, f"nothing can be sent to {target}: {error.strerror}", "see the routes")
    if small:
        hint = "give all machines between the same MTU, or lower that of our interface and restart netplugin"
        return Check(name, Health.FAILED, f"small packets reach {target}, those of {size} bytes do not", hint)
    return Check(name, Health.WARNING, f"{target} does not answer echo requests", "see cables, routes and firewalls")


def as_json(checks: list[Check]) -> str:
    """The checks for a program."""
    return json.dumps([check._asdict() for check in checks], indent=2)
