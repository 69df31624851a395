"""`weft verify netpol FILE`: tables of expected verdicts, and files that are not tables."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import ORACLES

from weft.cli import main

TABLE = ORACLES / "netpol-cases.json.gz"


def pod(namespace: str, name: str, ip: str, **labels: str) -> dict[str, Any]:
    ports = [{"container": "c", "port": 80, "portName": "http", "protocol": "TCP"}]
    return {"namespace": namespace, "name": name, "ip": ip, "labels": labels, "ports": ports}


def policy(**spec: Any) -> dict[str, Any]:
    return {"Policy": {"metadata": {"name": "p", "namespace": "x"}, "spec": {"podSelector": {}, **spec}}}


PODS = [pod("x", "a", "10.0.0.1", app="a"), pod("y", "b", "10.0.0.2", app="b")]
NAMESPACES: dict[str, Any] = {"x": {"ns": "x"}, "y": None}
ALLOWED, BLOCKED = ["allowed", "allowed", "allowed"], ["blocked", "allowed", "blocked"]


def step(
    *actions: dict[str, Any],
    expected: list[list[Any]],
    pods: list[dict[str, Any]] = PODS,
    namespaces: dict[str, Any] = NAMESPACES,
) -> dict[str, Any]:
    resources = {"namespaces": namespaces, "pods": pods}
    return {"actions": list(actions) or None, "probe": {}, "resources": resources, "expected": expected}


def row(verdicts: list[str], *, source: str = "y/b", target: str = "x/a", port: object = 80) -> list[Any]:
    return [source, target, "TCP", port, *verdicts]


def verify(path: Path, *steps: dict[str, Any]) -> int:
    path.write_text(json.dumps({"columns": [], "cases": [{"description": "case", "tags": [], "steps": list(steps)}]}))
    return main(["verify", "netpol", str(path)])


@pytest.mark.skipif(not TABLE.exists(), reason="the table of expected verdicts is kept beside the repository")
def test_the_engine_agrees_with_the_whole_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "netpol", str(TABLE)]) == 0
    assert capsys.readouterr().out.splitlines() == ["agree 41667 of 41667"]


def test_steps_build_on_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from_b = {
        "from": [{"podSelector": {"matchLabels": {"app": "b"}}, "namespaceSelector": {"matchLabels": {"t": "1"}}}]
    }
    named = {"x": {}, "y": {"t": "1"}}
    moved = [PODS[0], pod("y", "b", "10.0.0.2", app="z")]
    ref = {"Namespace": "y", "Pod": "b", "Labels": {}}
    code = verify(
        tmp_path / "table.json",
        step({"CreatePolicy": policy()}, expected=[row(BLOCKED)]),
        step({"UpdatePolicy": policy(ingress=[from_b])}, expected=[row(BLOCKED)]),
        step({"SetNamespaceLabels": {"Namespace": "y", "Labels": {}}}, expected=[row(ALLOWED)], namespaces=named),
        step({"SetPodLabels": ref}, expected=[row(BLOCKED)], pods=moved, namespaces=named),
        step({"ReadNetworkPolicies": {"Namespaces": ["x"]}}, expected=[row(ALLOWED)], namespaces=named),
        step({"DeletePod": ref}, expected=[], pods=PODS[:1], namespaces=named),
        step({"CreatePod": ref}, expected=[row(BLOCKED)], pods=moved, namespaces=named),
        step({"DeletePolicy": {"Namespace": "x", "Name": "p"}}, expected=[row(ALLOWED)]),
    )
    assert code == 0
    assert capsys.readouterr().out == "agree 7 of 7\n"


def test_deleting_a_namespace_deletes_its_policies(tmp_path: Path) -> None:
    code = verify(
        tmp_path / "table.json",
        step({"CreatePolicy": policy()}, expected=[row(BLOCKED)]),
        step({"DeleteNamespace": {"Namespace": "x"}}, expected=[], pods=PODS[1:], namespaces={"y": {}}),
        step({"CreateNamespace": {"Namespace": "x", "Labels": {}}}, expected=[row(ALLOWED)]),
    )
    assert code == 0


def test_rows_that_differ_are_listed_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [row(ALLOWED), row(BLOCKED), row(["allowed", "blocked", "blocked"])]
    assert verify(tmp_path / "table.json", step({"CreatePolicy": policy()}, expected=wrong)) == 1
    *differing, last = capsys.readouterr().out.splitlines()
    assert last == "agree 1 of 3"
    assert len(differing) == 2
    assert all("case, step 1: y/b -> x/a tcp/80" in line and "k8s/x/p/ingress/isolation" in line for line in differing)


def test_invalid_rows_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(ALLOWED), row(["", "", "invalid named port"], port=None), row(["", "", "invalid"], target="x/none")]
    assert verify(tmp_path / "table.json", step(expected=rows)) == 0
    assert capsys.readouterr().out == "agree 1 of 1\n"


def test_a_port_may_be_named(tmp_path: Path) -> None:
    opened = policy(ingress=[{"ports": [{"port": "http"}]}])
    assert verify(tmp_path / "table.json", step({"CreatePolicy": opened}, expected=[row(ALLOWED, port="http")])) == 0


def test_a_plain_and_a_gzipped_file_are_read(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain.json", tmp_path / "packed"
    assert verify(plain, step(expected=[row(ALLOWED)])) == 0
    packed.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
    assert main(["verify", "netpol", str(packed)]) == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"\x1f\x8bnot gzip",
        gzip.compress(b"{}" * 100, mtime=0)[:-20],
        b'{"cases": [{"steps": [{}]}]}',
        b'{"cases": [{"steps": [{"actions": [{"Explode": {}}], "resources": {}, "expected": []}]}]}',
        b'{"cases": [{"steps": [{"actions": [{"CreatePolicy": {"Policy": {}}}], "resources": {}, "expected": []}]}]}',
        b'{"cases": [{"steps": [{"resources": {}, "expected": [["a/b", "c/d", "TCP", 1, "", "", ""]]}]}]}',
    ],
)
def test_a_malformed_file_is_rejected(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table"
    path.write_bytes(content)
    assert main(["verify", "netpol", str(path)]) == 2
    assert capsys.readouterr().err.startswith("weft verify: ")


def test_a_missing_file_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "netpol", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
