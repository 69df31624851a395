"""`weft trace --packet`: whether engine and packet agree."""

from __future__ import annotations

from typing import Any

import pytest

from weft.ctl.weft.packet_trace import ProbeResult, ProbeStatus, agrees, format_comparison
from weft.ctl.weft.trace import main

RULE = "contiv/default/p/1"


def explanation(*, allowed: bool) -> dict[str, Any]:
    decided_by = "weft/default" if allowed else RULE
    return {"source": "a", "target": "b", "service": "tcp/80", "allowed": allowed, "decidedBy": decided_by}


@pytest.mark.parametrize(
    ("allowed", "result", "agree"),
    [
        (True, ProbeResult(ProbeStatus.ANSWERED, "SYN-ACK"), True),
        (True, ProbeResult(ProbeStatus.DELIVERED, "wp1"), True),
        (True, ProbeResult(ProbeStatus.FORWARDED, "wx1"), True),
        (True, ProbeResult(ProbeStatus.DROPPED, RULE, "why"), False),
        (True, ProbeResult(ProbeStatus.DROPPED, "weft/unknown-identity", "why"), False),
        (False, ProbeResult(ProbeStatus.DROPPED, RULE, "why"), True),
        (False, ProbeResult(ProbeStatus.DROPPED, "weft/spoofed", "why"), False),
        (False, ProbeResult(ProbeStatus.DELIVERED, "wp1"), False),
        (False, ProbeResult(ProbeStatus.FORWARDED, "wx1"), False),
        (False, ProbeResult(ProbeStatus.ANSWERED, "RST"), False),
        (True, ProbeResult(ProbeStatus.LOST), None),
        (False, ProbeResult(ProbeStatus.LOST), None),
    ],
)
def test_they_agree_only_if_the_same_rule_decides(allowed: bool, result: ProbeResult, agree: bool | None) -> None:
    assert agrees(explanation(allowed=allowed), result) is agree
    end = {"address": "10.1.1.1"}
    *_, packet, verdict = format_comparison(
        {"explanation": explanation(allowed=allowed), "source": end, "target": end}, result
    )
    assert str(result) in packet
    assert result.by in packet
    assert verdict.strip() == {True: "they AGREE", False: "they DIFFER", None: "they cannot be compared"}[agree]


def test_an_unreachable_agent_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a", "b", "tcp/80", "--packet", "--agent", "127.0.0.1:1"]) == 2
    assert "is netplugin running here?" in capsys.readouterr().err
