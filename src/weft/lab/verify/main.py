"""`weft oracle netpol FILE`: judge the policy engine by a table of right answers for NetworkPolicy.

With `--packets DATAPATH` the packets of a real datapath are judged instead, in namespaces made for it (`oracle_table`
has the form of the file).
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from weft.domain.policy.model.rules import Action
from weft.lab.verify.oracle_table import Moment, Row, read_cases, walk

# Where packets are judged; it is above this layer, so only who asks for it gets it.
_PACKETS = "weft.lab.verify.packets"


class Judge(Protocol):
    """Who says whether rows hold."""

    def node_of(self, pod: str) -> str:
        """The node on which a pod is to be."""
        ...

    def judge(self, moment: Moment) -> Iterator[str | None]:
        """For every row that can be judged: None where it holds, else the difference in words."""
        ...

    def left_out(self) -> str:
        """What could not be judged, in words; empty where there was nothing."""
        ...


class EngineJudge:
    """Asks the engine itself, at both ends of a flow."""

    def node_of(self, _: str) -> str:
        return ""

    def judge(self, moment: Moment) -> Iterator[str | None]:
        for row in moment.rows:
            yield _difference(row, moment)

    def left_out(self) -> str:
        return ""


def main(argv: Sequence[str]) -> int:
    """Print each row that differs, then `agree N of M`; 1 when a row differs. `Malformed` when the file is no table."""
    parser = argparse.ArgumentParser(prog="weft oracle", description="Judge the policy engine by right answers.")
    parser.add_argument("kind", choices=["netpol"], help="netpol: Kubernetes NetworkPolicy")
    parser.add_argument("file", type=Path, help="a table of cases, JSON or gzipped JSON")
    parser.add_argument(
        "--packets", metavar="DATAPATH", help="judge real packets: linux, ovs, ovs-vlan-bridge …; needs root"
    )
    parser.add_argument("--hosts", type=int, choices=[1, 2], default=1, help="on how many hosts the pods are (1)")
    args = parser.parse_args(argv)
    cases = read_cases(args.file)
    with _open_judge(args.packets, hosts=args.hosts) as judge:
        return _run(judge, (moment for case in cases for moment in walk(case, judge.node_of)))


def _open_judge(datapath: str | None, *, hosts: int) -> AbstractContextManager[Judge]:
    if datapath is None:
        return nullcontext(EngineJudge())
    opened: AbstractContextManager[Judge] = importlib.import_module(_PACKETS).open_packet_judge(datapath, hosts=hosts)
    return opened


def _run(judge: Judge, moments: Iterator[Moment]) -> int:
    agreed = judged = 0
    for moment in moments:
        for difference in judge.judge(moment):
            judged += 1
            if difference is None:
                agreed += 1
            else:
                print(f"{moment.name}: {difference}")
    left_out = judge.left_out()
    print(f"agree {agreed} of {judged}" + (f"; left out {left_out}" if left_out else ""))
    return 0 if agreed == judged else 1


def _difference(row: Row, moment: Moment) -> str | None:
    flow = moment.flow(row)
    verdict = moment.engine.verdict(flow)
    ours = _word(allowed=verdict.ingress.action is Action.ALLOW), _word(allowed=verdict.egress.action is Action.ALLOW)
    if (*ours, _word(allowed=verdict.allowed)) == (row.ingress, row.egress, row.combined):
        return None
    return (
        f"{flow}: expected ingress {row.ingress}, egress {row.egress}; "
        f"engine: ingress {ours[0]} by {verdict.ingress.id}, egress {ours[1]} by {verdict.egress.id}"
    )


def _word(*, allowed: bool) -> str:
    return "allowed" if allowed else "blocked"
