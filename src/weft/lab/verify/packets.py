"""`weft verify netpol FILE --packets DATAPATH`: takes verdicts from packets sent through a real datapath.

Pods are network namespaces. They stay plugged into the datapath for all cases; between steps only the policy map
changes. All probes of a step are sent at once. With two hosts, pods are placed on them in turn.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path

from weft.domain.addresses import parse_address
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.model.identities import Identity
from weft.kernel.netns import NamespaceDirectory
from weft.lab.namespaces import mount, private_namespaces, unmount
from weft.lab.traffic import TCP, UDP, NetnsAddress
from weft.lab.verify.bare_nodes import BareNode, open_nodes
from weft.lab.verify.packet_matrix import Listeners, Probe, send_probes
from weft.lab.verify.verdict_table import ExpectedVerdict, Step

_TRANSPORTS = {"TCP": TCP, "UDP": UDP}


class PacketVerifier:
    """Takes verdicts from packets; see `weft.lab.verify.main.Verifier`."""

    def __init__(self, nodes: Sequence[BareNode], directory: Path, closing: ExitStack) -> None:
        self._nodes = nodes
        self._namespaces = NamespaceDirectory(directory / "pods")
        self._namespaces.prepare()
        self._closing = closing
        self._listeners = closing.enter_context(Listeners())
        self._home: dict[str, BareNode] = {}
        self._places: dict[str, NetnsAddress] = {}
        self._skipped: Counter[str] = Counter()

    def node_of(self, pod: str) -> str:
        # Placed once and kept, because the engine gets the node with the pod.
        if pod not in self._home:
            self._home[pod] = self._nodes[len(self._home) % len(self._nodes)]
        return self._home[pod].name

    def verify(self, step: Step) -> Iterator[str | None]:
        self._place_pods(step.engine)
        # After the pods are plugged: identities refer to their addresses.
        for node in self._nodes:
            node.enforce(step.engine, None if step.is_first else step.affected)
        probes = {row: self._probe(row, step) for row in step.rows if self._can_probe(row)}
        results = send_probes(
            list(probes.values()),
            self._listeners,
            count_denied=lambda: sum(node.count_denied() for node in self._nodes),
        )
        for row, probe in probes.items():
            arrived = probe in results.arrived
            # A lost packet may belong to any row that did not arrive, so it fails all of them.
            if arrived is (row.combined == "allowed") and (arrived or not results.lost):
                yield None
            else:
                yield _difference(row, step, arrived=arrived, lost=results.lost)

    def skipped(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self._skipped.items()))

    def _can_probe(self, row: ExpectedVerdict) -> bool:
        if row.source == row.target:
            # A pod reaches itself over its own loopback, not through the datapath.
            self._skipped["of a pod to itself"] += 1
        elif row.protocol not in _TRANSPORTS:
            self._skipped[f"of {row.protocol}"] += 1
        else:
            return True
        return False

    def _probe(self, row: ExpectedVerdict, step: Step) -> Probe:
        return Probe(self._places[row.source], self._places[row.target], _TRANSPORTS[row.protocol], step.flow(row).port)

    def _place_pods(self, engine: Engine) -> None:
        """Plug new pods and unplug deleted ones."""
        for key in self._places.keys() - engine.workloads.keys():
            self._remove(key)
        for identity in map(engine.directory.get, engine.workloads):
            if identity is not None and identity.key not in self._places:
                self._add(identity)

    def _add(self, identity: Identity) -> None:
        pod = identity.key
        name = _name(pod)
        (address,) = identity.addresses
        namespace = self._closing.enter_context(self._namespaces.create(name))
        self._home[pod].plug(pod, address, self._namespaces.path / name)
        for other in self._others(pod):
            other.add_remote(address, self._home[pod])
        self._places[pod] = NetnsAddress(namespace, ip_address(str(address)))

    def _remove(self, pod: str) -> None:
        place = self._places.pop(pod)
        self._listeners.close_at(place)
        self._home[pod].unplug(pod)
        for other in self._others(pod):
            other.remove_remote(parse_address(str(place.address), field="ip"), self._home[pod])
        self._namespaces.delete(_name(pod))

    def _others(self, pod: str) -> list[BareNode]:
        """The hosts that do not run a pod."""
        return [node for node in self._nodes if node is not self._home[pod]]


def _name(pod: str) -> str:
    """A pod's key as a file name."""
    return pod.replace("/", "+")


def _difference(row: ExpectedVerdict, step: Step, *, arrived: bool, lost: int) -> str:
    flow = step.flow(row)
    verdict = step.engine.verdict(flow)
    packet = "arrived" if arrived else "did not arrive"
    unaccounted = f", and {lost} packets neither arrived nor were counted as denied" if lost else ""
    return (
        f"{flow}: expected {row.combined}; the packet {packet}{unaccounted}; "
        f"engine: ingress by {verdict.ingress.id}, egress by {verdict.egress.id}"
    )


@contextmanager
def open_packet_verifier(datapath: str, *, hosts: int) -> Iterator[PacketVerifier]:
    """Open a verifier with its own hosts. `datapath` names the modes as `weft.lab.netlab.lab_modes` reads them.

    The calling thread is in private namespaces inside the block, which needs root.
    """
    with private_namespaces(), ExitStack() as closing:
        # A tmpfs, because namespace pins are mounts and must vanish with the mount namespace.
        directory = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="weft-", ignore_cleanup_errors=True)))
        mount(None, directory, kind="tmpfs")
        closing.callback(unmount, directory)
        nodes = closing.enter_context(open_nodes(directory, lab=datapath, hosts=hosts))
        yield PacketVerifier(nodes, directory, closing)
