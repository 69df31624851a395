"""`weft drops`: its requests to the agent and its output."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from weft.ctl.weft.drops import main

if TYPE_CHECKING:
    from tests.unit.ctl.conftest import Stub

DROP: dict[str, Any] = {
    "at": 1_794_700_800.25,
    "tenant": "default",
    "rule": "contiv/default/p/no-81",
    "reason": "the rule denies it (ingress at the destination)",
    "protocol": 6,
    "service": "tcp/81",
    "source": {"address": "192.0.2.1", "port": 4711, "identity": "192.0.2.1", "pod": ""},
    "target": {"address": "10.1.1.1", "port": 81, "identity": "default:net:till", "pod": "lab/till"},
    "direction": "ingress",
    "inIface": "",
    "outIface": "wp1",
}
RULES = [
    {"tenant": tenant, "rule": f"contiv/{tenant}/p/1", "direction": "ingress", "action": "denied", "packets": 7}
    for tenant in ("blue", "default")
]


def agent(stub: Stub) -> tuple[str, str]:
    return "--agent", stub.url.removeprefix("http://")


def test_a_pipe_gets_an_aligned_table(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answers("GET /drops?tenant=default&pod=lab%2Ftill", [DROP])
    assert main(["--tenant", "default", "--pod", "lab/till", *agent(stub)]) == 0
    titles, _, row = capsys.readouterr().out.splitlines()
    assert titles.split() == ["Time", "Tenant", "From", "To", "Service", "Rule", "Reason"]
    assert row.split()[:7] == [
        "2026-11-15T00:00:00.250Z", "default", "192.0.2.1", "lab/till", "(10.1.1.1)", "tcp/81", "contiv/default/p/no-81"
    ]  # fmt: skip


def test_a_terminal_gets_a_table_too(
    stub: Stub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of rules are printed literally, not as markup."""
    stub.answers("GET /drops", [DROP | {"rule": "[red]r[/red]"}])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "300")
    assert main([*agent(stub)]) == 0
    shown = capsys.readouterr().out
    assert "lab/till (10.1.1.1)" in shown
    assert "[red]r[/red]" in shown


def test_json_is_one_object_per_line(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.answers("GET /drops", [DROP, DROP])
    assert main(["--json", *agent(stub)]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [DROP, DROP]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_follow_prints_until_the_agent_ends_the_stream(
    stub: Stub, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    lines = ["", json.dumps(DROP), "", json.dumps({"ended": "the agent is shutting down"})]
    stub.answers("GET /drops?follow=1", "\n".join(lines).encode() + b"\n")
    assert main(["--follow", *flags, *agent(stub)]) == 3
    shown = capsys.readouterr()
    if flags:
        assert json.loads(shown.out) == DROP
    else:
        assert "192.0.2.1 -> lab/till (10.1.1.1) tcp/81  contiv/default/p/no-81: the rule denies it" in shown.out
    assert "the agent is shutting down" in shown.err


def test_counters_show_rules_and_drop_reasons(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    policy = {"rules": RULES, "reasons": {"weft/rogue-ra": 0, "weft/spoofed": 4}, "truncated": 2}
    stub.answers("GET /inspect/driver", {"policy": policy})
    assert main(["--counters", *agent(stub)]) == 0
    shown = capsys.readouterr()
    assert [line.split() for line in shown.out.splitlines()[2:]] == [
        ["blue", "contiv/blue/p/1", "ingress", "denied", "7"],
        ["default", "contiv/default/p/1", "ingress", "denied", "7"],
        ["weft/spoofed", "dropped", "4"],
    ]
    assert "2 more rules" in shown.err
    assert main(["--counters", "--json", "--tenant", "blue", *agent(stub)]) == 0
    assert [json.loads(line)["tenant"] for line in capsys.readouterr().out.splitlines()] == ["blue"]


@pytest.mark.parametrize("flags", [[], ["--follow"], ["--counters"]])
def test_an_unreachable_agent_or_an_error_is_reported(
    stub: Stub, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main([*flags, "--agent", "127.0.0.1:1"]) == 2
    assert "is netplugin running here?" in capsys.readouterr().err
    assert main([*flags, *agent(stub)]) == 3
    assert "does not exist" in capsys.readouterr().err
    assert main([*flags, "--agent", "nonsense"]) == 1
