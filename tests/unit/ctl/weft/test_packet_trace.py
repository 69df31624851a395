"""Whether a packet's fate is what the engine said."""

from __future__ import annotations

from typing import Any

import pytest

from weft.ctl.weft.packet_trace import Fate, Seen, judge, tell
from weft.ctl.weft.trace import main

RULE = "contiv/default/p/1"


def explanation(*, allowed: bool) -> dict[str, Any]:
    decided_by = "weft/default" if allowed else RULE
    return {"source": "a", "target": "b", "service": "tcp/80", "allowed": allowed, "decidedBy": decided_by}


@pytest.mark.parametrize(
    ("allowed", "seen", "agree"),
    [
        (True, Seen(Fate.ANSWERED, "SYN-ACK"), True),
        (True, Seen(Fate.ARRIVED, "wp1"), True),
        (True, Seen(Fate.LEFT, "wx1"), True),
        (True, Seen(Fate.REFUSED, RULE, "why"), False),
        (True, Seen(Fate.REFUSED, "weft/stranger", "why"), False),
        (False, Seen(Fate.REFUSED, RULE, "why"), True),
        (False, Seen(Fate.REFUSED, "weft/spoofed", "why"), False),
        (False, Seen(Fate.ARRIVED, "wp1"), False),
        (False, Seen(Fate.LEFT, "wx1"), False),
        (False, Seen(Fate.ANSWERED, "RST"), False),
        (True, Seen(Fate.UNSEEN), None),
        (False, Seen(Fate.UNSEEN), None),
    ],
)
def test_they_agree_only_down_to_the_rule(allowed: bool, seen: Seen, agree: bool | None) -> None:
    assert judge(explanation(allowed=allowed), seen) is agree
    end = {"address": "10.1.1.1"}
    *_, packet, verdict = tell({"explanation": explanation(allowed=allowed), "source": end, "target": end}, seen)
    assert str(seen) in packet
    assert seen.by in packet
    assert verdict.strip() == {True: "they AGREE", False: "they DIFFER", None: "they cannot be compared"}[agree]


def test_an_agent_that_is_away_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a", "b", "tcp/80", "--packet", "--agent", "127.0.0.1:1"]) == 2
    assert "is netplugin running here?" in capsys.readouterr().err
