"""Endpoints plugged in one batch: they share a transaction, and one that fails does not affect the others."""

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


def plug_request(pod: Pod) -> PlugRequest:
    return PlugRequest(pod.config, Difference(pod.ip_identities(), ()))


def test_a_batch_of_endpoints_shares_a_transaction(testbed: PolicyTestbed) -> None:
    """One that fails leaves nothing and delays none; the others send and receive from then on."""
    first, second, lost, last = pods = [testbed.unplugged_pod(number) for number in range(1, 5)]
    nowhere = msgspec.structs.replace(lost.config, netns="/run/nowhere")
    before = read_generation(testbed.netns.netfilter)
    faults = [
        *testbed.datapath.plug_batch(
            [plug_request(each._replace(config=nowhere) if each is lost else each) for each in pods]
        )
    ]
    assert [type(fault) for fault in faults] == [type(None), type(None), NotFound, type(None)]
    assert read_generation(testbed.netns.netfilter) == before + 1
    assert testbed.datapath.converge(testbed.items([first, second, last])).repaired == ()
    for source, target in ((first, last), (last, second), (second, first)):
        assert testbed.probe(source, target, UDP, 8080) == 0


def test_a_batch_reports_each_endpoints_failure(testbed: PolicyTestbed) -> None:
    """After a failed batch each is tried alone: all fail, because the table is deleted, until `converge` repairs it."""
    one, two = pods = [testbed.unplugged_pod(number) for number in (1, 2)]
    delete = ["nft", "delete", "table", "inet", "weft"]
    testbed.netns.namespace.run(lambda: subprocess.run(delete, check=True, timeout=DEADLINE))
    faults = [*testbed.datapath.plug_batch([*map(plug_request, pods)])]
    assert [isinstance(fault, DatapathFault) for fault in faults] == [True, True]
    testbed.datapath.converge(testbed.items(pods))
    assert testbed.probe(one, two, UDP, 8080) == 0
