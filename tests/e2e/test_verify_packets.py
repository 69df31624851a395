"""`weft verify netpol FILE --packets linux`: verify NetworkPolicy verdicts with packets, on one host and two."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import ORACLES

from weft.cli import main

TABLE = ORACLES / "netpol-cases.json.gz"
# The whole table in other modes, with the number of hosts.
OTHER_MODES = itertools.product(("linux-vxlan-bridge", "ovs-vlan", "ovs-vxlan-bridge", "ovs-vlan-bridge"), ("1", "2"))
ALLOWED, BLOCKED = ["allowed"] * 3, ["blocked", "allowed", "blocked"]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="creating namespaces needs root"),
    pytest.mark.timeout(600),
]


def pod(namespace: str, name: str, ip: str) -> dict[str, Any]:
    return {"namespace": namespace, "name": name, "ip": ip, "labels": {"app": name}, "ports": []}


def verify(path: Path, *flags: str, rows: list[list[Any]]) -> int:
    """Verify rows under a policy that denies all ingress to namespace x."""
    closed = {"metadata": {"name": "closed", "namespace": "x"}, "spec": {"podSelector": {}}}
    step = {
        "actions": [{"CreatePolicy": {"Policy": closed}}],
        "resources": {
            "namespaces": {"x": {}, "y": {}},
            "pods": [pod("x", "a", "10.0.0.1"), pod("y", "b", "10.0.0.2")],
        },
        "expected": rows,
    }
    path.write_text(json.dumps({"cases": [{"description": "closed", "steps": [step]}]}))
    return main(["verify", "netpol", str(path), "--packets", "linux", *flags])


@pytest.mark.skipif(not TABLE.exists(), reason="the table of expected verdicts is not in the repository")
@pytest.mark.parametrize(
    ("datapath", "hosts"),
    [
        *itertools.product(("linux", "ovs"), ("1", "2")),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in OTHER_MODES),
    ],
)
def test_all_rows_of_the_table_agree(hosts: str, datapath: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "netpol", str(TABLE), "--packets", datapath, "--hosts", hosts]) == 0
    assert capsys.readouterr().out == "agree 24768 of 24768; skipped 12276 of SCTP, 4623 of a pod to itself\n"


@pytest.mark.parametrize("hosts", ["1", "2"])
def test_packets_with_another_verdict_are_reported(
    tmp_path: Path, hosts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [
        ["y/b", "x/a", "TCP", 80, *ALLOWED],
        ["y/b", "x/a", "UDP", 80, *ALLOWED],
        ["x/a", "y/b", "TCP", 80, *BLOCKED],
        ["x/a", "y/b", "UDP", 80, *BLOCKED],
    ]
    right = [["y/b", "x/a", "TCP", 81, *BLOCKED], ["x/a", "y/b", "UDP", 81, *ALLOWED]]
    assert verify(tmp_path / "table.json", "--hosts", hosts, rows=wrong + right) == 1
    *differences, last = capsys.readouterr().out.splitlines()
    assert last == "agree 2 of 6"
    assert [line.partition(";")[0] for line in differences] == [
        "closed, step 1: y/b -> x/a tcp/80: expected allowed",
        "closed, step 1: y/b -> x/a udp/80: expected allowed",
        "closed, step 1: x/a -> y/b tcp/80: expected blocked",
        "closed, step 1: x/a -> y/b udp/80: expected blocked",
    ]
    assert ["did not arrive" in line for line in differences] == [True, True, False, False]
    assert all("k8s/x/closed/ingress/isolation" in line for line in differences[:2])


def test_rows_that_cannot_be_probed_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["x/a", "x/a", "TCP", 80, *BLOCKED], ["y/b", "x/a", "SCTP", 80, *BLOCKED]]
    assert verify(tmp_path / "table.json", rows=rows) == 0
    assert capsys.readouterr().out == "agree 0 of 0; skipped 1 of SCTP, 1 of a pod to itself\n"


def test_an_unknown_datapath_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table.json"
    path.write_text('{"cases": []}')
    assert main(["verify", "netpol", str(path), "--packets", "none"]) == 2
    assert "none" in capsys.readouterr().err
