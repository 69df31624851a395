"""The judge of `weft oracle netpol FILE --packets DATAPATH`: what right answers say must become of real packets.

Pods are namespaces, plugged into the datapath once for all cases; between steps only policy changes, as the tables of
the engine tell it. Every pair of pods is asked at once. With two hosts the pods are on both in turn.
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
from weft.lab.namespaces import mount, stepped_apart, unmount
from weft.lab.traffic import TCP, UDP, Place
from weft.lab.verify.bare_nodes import BareNode, open_nodes
from weft.lab.verify.oracle_table import Moment, Row
from weft.lab.verify.packet_matrix import Listeners, Question, ask

_TRANSPORTS = {"TCP": TCP, "UDP": UDP}


class PacketJudge:
    """See `weft.lab.verify.main.Judge`."""

    def __init__(self, nodes: Sequence[BareNode], directory: Path, closing: ExitStack) -> None:
        self._nodes = nodes
        self._namespaces = NamespaceDirectory(directory / "pods")
        self._namespaces.prepare()
        self._closing = closing
        self._ears = closing.enter_context(Listeners())
        self._home: dict[str, BareNode] = {}
        self._places: dict[str, Place] = {}
        self._left_out: Counter[str] = Counter()

    def node_of(self, pod: str) -> str:
        if pod not in self._home:
            self._home[pod] = self._nodes[len(self._home) % len(self._nodes)]
        return self._home[pod].name

    def judge(self, moment: Moment) -> Iterator[str | None]:
        self._place_pods(moment.engine)
        for node in self._nodes:
            node.enforce(moment.engine, None if moment.is_first else moment.touched)
        questions = {row: self._question(row, moment) for row in moment.rows if self._can_be_asked(row)}
        answers = ask(
            list(questions.values()),
            self._ears,
            count_refused=lambda: sum(each.count_refused() for each in self._nodes),
        )
        for row, question in questions.items():
            arrived = question in answers.arrived
            if arrived is (row.combined == "allowed") and (arrived or not answers.vanished):
                yield None
            else:
                yield _difference(row, moment, arrived=arrived, vanished=answers.vanished)

    def left_out(self) -> str:
        return ", ".join(f"{count} {why}" for why, count in sorted(self._left_out.items()))

    def _can_be_asked(self, row: Row) -> bool:
        if row.source == row.target:
            self._left_out["of a pod to itself"] += 1
        elif row.protocol not in _TRANSPORTS:
            self._left_out[f"of {row.protocol}"] += 1
        else:
            return True
        return False

    def _question(self, row: Row, moment: Moment) -> Question:
        return Question(
            self._places[row.source], self._places[row.target], _TRANSPORTS[row.protocol], moment.flow(row).port
        )

    def _place_pods(self, engine: Engine) -> None:
        """Plug the pods that came, and unplug those that went."""
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
            other.learn(address, self._home[pod])
        self._places[pod] = Place(namespace, ip_address(str(address)))

    def _remove(self, pod: str) -> None:
        place = self._places.pop(pod)
        self._ears.forget(place)
        self._home[pod].unplug(pod)
        for other in self._others(pod):
            other.forget(parse_address(str(place.address), field="ip"), self._home[pod])
        self._namespaces.delete(_name(pod))

    def _others(self, pod: str) -> list[BareNode]:
        """The hosts on which a pod is not."""
        return [node for node in self._nodes if node is not self._home[pod]]


def _name(pod: str) -> str:
    """A pod's key as the name of a file."""
    return pod.replace("/", "+")


def _difference(row: Row, moment: Moment, *, arrived: bool, vanished: int) -> str:
    flow = moment.flow(row)
    verdict = moment.engine.verdict(flow)
    packet = "arrived" if arrived else "did not arrive"
    lost = f", and {vanished} packets neither arrived nor were refused" if vanished else ""
    return (
        f"{flow}: expected {row.combined}; the packet {packet}{lost}; "
        f"engine: ingress by {verdict.ingress.id}, egress by {verdict.egress.id}"
    )


@contextmanager
def open_packet_judge(datapath: str, *, hosts: int) -> Iterator[PacketJudge]:
    """A judge with hosts of its own, on a datapath in the modes that its name says (`weft.lab.lab_names`).

    The calling thread is in namespaces of its own meanwhile, which takes root.
    """
    with stepped_apart(), ExitStack() as closing:
        # In memory, because pins are mounts and are to be gone with the namespace.
        directory = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="weft-", ignore_cleanup_errors=True)))
        mount(None, directory, kind="tmpfs")
        closing.callback(unmount, directory)
        nodes = closing.enter_context(open_nodes(directory, lab=datapath, hosts=hosts))
        yield PacketJudge(nodes, directory, closing)
