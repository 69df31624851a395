"""Workloads that come at once: what they share, and what becomes of the others when one of them fails."""

from __future__ import annotations

import subprocess

import msgspec
from tests.support.policy_testbed import Pod, PolicyTestbed

from weft.domain.desired.diff import Difference
from weft.domain.errors import DatapathFault, NotFound
from weft.domain.policy.model.protocols import UDP
from weft.kernel.netlink.nft_set import read_generation
from weft.lab.waiting import DEADLINE
from weft.ports.datapath import PlugRequest


def plugging(pod: Pod) -> PlugRequest:
    return PlugRequest(pod.wiring, Difference(pod.who(), ()))


def test_workloads_that_come_at_once_share_a_transaction(ward: PolicyTestbed) -> None:
    """One that fails leaves nothing and holds up nobody; the others speak, and are spoken to, from then on."""
    first, second, lost, last = pods = [ward.coming_pod(number) for number in range(1, 5)]
    nowhere = msgspec.structs.replace(lost.wiring, netns="/run/nowhere")
    before = read_generation(ward.space.netfilter)
    faults = [
        *ward.datapath.plug_together(
            [plugging(each._replace(wiring=nowhere) if each is lost else each) for each in pods]
        )
    ]
    assert [type(fault) for fault in faults] == [type(None), type(None), NotFound, type(None)]
    assert read_generation(ward.space.netfilter) == before + 1
    assert ward.datapath.converge(ward.parts([first, second, last])).repaired == ()
    for source, target in ((first, last), (last, second), (second, first)):
        assert ward.ask(source, target, UDP, 8080) == 0


def test_workloads_that_come_at_once_are_told_each_what_the_kernel_refused(ward: PolicyTestbed) -> None:
    """Whoever can be helped alone is: here nobody, as somebody has taken the table away, until it is mended."""
    one, two = pods = [ward.coming_pod(number) for number in (1, 2)]
    delete = ["nft", "delete", "table", "inet", "weft"]
    ward.space.namespace.run(lambda: subprocess.run(delete, check=True, timeout=DEADLINE))
    faults = [*ward.datapath.plug_together([*map(plugging, pods)])]
    assert [isinstance(fault, DatapathFault) for fault in faults] == [True, True]
    ward.datapath.converge(ward.parts(pods))
    assert ward.ask(one, two, UDP, 8080) == 0
