"""The checks of `weft doctor`: each checks one thing and suggests a fix if it fails."""

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

# Bytes of the outer IP, UDP and VXLAN headers and the inner Ethernet header, by IP version of the underlay.
_VXLAN_OVERHEAD = {4: 50, 6: 70}
_SMALL_PACKET = 100
_MAX_PROBES = 16
_SELF_REPAIR = "netplugin repairs this within a minute; if it persists, check its log"
# STATUS exists since CNI 1.1.0.
_STATUS = b'{"cniVersion":"1.1.0","name":"weft","type":"weft-cni"}'


class Health(StrEnum):
    """The result of a check. A warning may be intended and does not make the node fail."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Check(NamedTuple):
    """A check with its result, and a hint for a fix."""

    name: str
    health: Health
    text: str
    hint: str = ""


def _results(name: str, faults: list[str], *, ok: str, hint: str, health: Health = Health.FAILED) -> Iterator[Check]:
    if not faults:
        yield Check(name, Health.OK, ok)
    for fault in faults:
        yield Check(name, health, fault, hint)


def check_all(agent: str, tools: DatapathTools, *, conf_dir: Path, switch: Path, within: float) -> Iterator[Check]:
    """Run all checks, those of the machine first. Without an agent, its checks are skipped."""
    # Without the agent first: these explain why it does not start.
    yield from check_machine(tools)
    yield from check_switch(tools, switch)
    yield from check_networks(conf_dir)
    try:
        node = inspect_agent(agent)
    except Failure as failure:
        yield Check("agent", Health.FAILED, failure.message, "start netplugin, or check its log")
        return
    yield from check_agent(node)
    yield from check_cni(Path(node["cniSocket"]), within=within)
    yield from check_dns(node)
    yield from check_tenants(node)
    yield from check_peers(node, within=within)


def check_machine(tools: DatapathTools) -> Iterator[Check]:
    """Whether the kernel has the features that Weft needs, and whether a firewall interferes."""
    # Both need root: they create a network namespace and read the ruleset.
    try:
        missing, conflicts = tools.probe(), tools.find_conflicts()
    except WeftError as error:
        yield Check("kernel", Health.FAILED, error.message, "run weft doctor as root")
        return
    yield from _results(
        "kernel",
        missing,
        ok="veth, vxlan and nftables work",
        hint="load the modules veth, vxlan, nf_tables and nft_fwd_netdev, and macvlan for Open vSwitch",
    )
    yield from _results(
        "firewall",
        conflicts,
        ok="no other base chain drops by default",
        hint="allow the VXLAN UDP port, and forwarded traffic of workloads, in that firewall",
        health=Health.WARNING,
    )


def check_switch(tools: DatapathTools, switch: Path) -> Iterator[Check]:
    """Whether Open vSwitch, if the datapath uses it, runs and is configured correctly."""
    for result in tools.check_switch(switch):
        health = Health.OK if not result.remedy else Health.FAILED if result.is_fatal else Health.WARNING
        yield Check(result.name, health, result.text, result.remedy)


def check_networks(conf_dir: Path) -> Iterator[Check]:
    """Whether other plugins in the CNI network lists are compatible with ours."""
    try:
        chains = [chain for chain in read_chains(conf_dir) if chain.calls(NAMES)]
    except OSError as error:
        yield Check("networks", Health.FAILED, f"{conf_dir} cannot be read: {error}", "run weft doctor as root")
        return
    yield from _results(
        "networks",
        [fault for chain in chains if (fault := chain.fault(NAMES))],
        ok=f"{len(chains)} networks in {conf_dir} call our plugin",
        hint="remove them from the list: they have no effect on ports of this datapath",
    )


def check_agent(node: Mapping[str, Any]) -> Iterator[Check]:
    """Whether the agent is ready and connected to the store."""
    name, count = node["node"], len(node["ports"])
    yield from _results(
        "agent", list(node["reasons"]), ok=f"{name} is ready with {count} workloads", hint="check netplugin's log"
    )
    store = [] if node["storeConnected"] else ["not connected to the store"]
    yield from _results(
        "store",
        store,
        ok=f"connected, revision {node['appliedRevision']} is applied",
        hint="check that netmaster or etcd runs and is reachable from here (--netmaster, --etcd-endpoints)",
    )


def check_tenants(node: Mapping[str, Any]) -> Iterator[Check]:
    """Whether the tenant netns are configured correctly, and the kernel matches the attachment store."""
    tenants = node["tenantNamespaces"]
    faults = [f"tenant {netns['tenant']}: {fault}" for netns in tenants for fault in netns["faults"]]
    yield from _results("tenants", faults, ok=f"{len(tenants)} tenant namespaces are ok", hint=_SELF_REPAIR)
    inconsistencies = list(node["inconsistencies"])
    yield from _results("attachments", inconsistencies, ok="kernel and attachment store agree", hint=_SELF_REPAIR)


def check_dns(node: Mapping[str, Any]) -> Iterator[Check]:
    """Whether netdns is connected to the agent. Without it netdns keeps answering from its cached zones."""
    if node["dns"] != "disabled":
        yield from _results(
            "dns",
            ["netdns is not connected to the agent"] if node["dns"] == "unreachable" else [],
            ok="netdns answers for every tenant here",
            hint="start netdns, or check its log; to run without DNS give netplugin --dns-socket none",
        )


def check_cni(path: Path, *, within: float) -> Iterator[Check]:
    """Whether the agent's CNI socket answers STATUS."""
    call = Call(environment={"CNI_COMMAND": "STATUS"}, stdin=_STATUS, deadline=within)
    try:
        answer = _call(path, call, within=within)
    except (OSError, Unreadable) as error:
        yield Check("cni", Health.FAILED, f"{path} does not answer: {error}", "check netplugin's log")
        return
    error_object = CniError.decode(answer.stdout) if answer.exit_code else None
    faults = [error_object.message if error_object else "STATUS failed"] if answer.exit_code else []
    yield from _results("cni", faults, ok=f"{path} answers", hint="check netplugin's log")


def _call(path: Path, call: Call, *, within: float) -> Answer:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(within)
        connection.connect(str(path))
        connection.sendall(encode_call(call))
        with connection.makefile("rb") as reader:
            return decode_answer(reader.read(body_size(reader.read(HEADER_SIZE))))


def check_peers(node: Mapping[str, Any], *, within: float) -> Iterator[Check]:
    """Whether the path MTU to every other node is large enough for encapsulated packets of workloads."""
    own = str(node["vtepIp"])
    size = int(node["mtu"]) + _VXLAN_OVERHEAD[ip_address(own).version]
    peers = [peer for peer in node["peers"] if peer["vtepIp"]]
    # Other nodes cannot reach a tunnel endpoint on loopback, the default of a machine without an address.
    if ip_address(own).is_loopback and peers:
        yield Check("tunnels", Health.FAILED, f"the local tunnel endpoint is {own}", "set --vtep-ip of netplugin")
        return
    # Concurrently: a node without a reply takes the whole timeout, twice.
    with ThreadPoolExecutor(max_workers=_MAX_PROBES) as threads:
        yield from threads.map(partial(_check_peer, own, size, within), peers)


def _check_peer(own: str, size: int, within: float, peer: Mapping[str, Any]) -> Check:
    name = f"peer {peer['node']}"
    if peer["state"] == "unreachable":
        return Check(name, Health.WARNING, "its agent is unreachable", "check netplugin on that node")
    target = str(peer["vtepIp"])
    try:
        if mtu_probe.answers(target, size=size, source=own, within=within):
            return Check(name, Health.OK, f"path MTU ok: packets of {size} bytes reach {target}")
        # Distinguishes a small path MTU from a peer that does not answer ICMP at all.
        small = mtu_probe.answers(target, size=_SMALL_PACKET, source=own, within=within)
    except OSError as error:
        return Check(name, Health.FAILED, f"cannot send to {target}: {error.strerror}", "check the routes")
    if small:
        hint = "raise the MTU on the path, or lower it on this node's underlay interface and restart netplugin"
        return Check(name, Health.FAILED, f"path MTU too small: packets of {size} bytes do not reach {target}", hint)
    return Check(name, Health.WARNING, f"{target} does not answer echo requests", "check links, routes and firewalls")


def as_json(checks: list[Check]) -> str:
    """The checks as JSON."""
    return json.dumps([check._asdict() for check in checks], indent=2)
