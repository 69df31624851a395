"""`weft verify netpol FILE`: verify NetworkPolicy verdicts against a table of expected ones.

By default the verdicts come from the policy engine. With `--packets DATAPATH` they come from packets that are sent
through a real datapath, in network namespaces made for the run. `verdict_table` describes the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from weft.domain.policy.model.rules import Action
from weft.lab.verify.verdict_table import ExpectedVerdict, Step, read_cases, walk


class Verifier(Protocol):
    """A source of verdicts to compare with the expected ones."""

    def node_of(self, pod: str) -> str:
        """The node that runs a pod."""
        ...

    def verify(self, step: Step) -> Iterator[str | None]:
        """For every row that can be verified: None if it holds, else a description of the difference."""
        ...

    def skipped(self) -> str:
        """What could not be verified, for the summary line; empty if nothing was skipped."""
        ...


class EngineVerifier:
    """Takes verdicts from the policy engine, for egress and for ingress."""

    def node_of(self, _: str) -> str:
        return ""

    def verify(self, step: Step) -> Iterator[str | None]:
        for row in step.rows:
            yield _difference(row, step)

    def skipped(self) -> str:
        return ""


def main(argv: Sequence[str]) -> int:
    """Print each row that differs, then `agree N of M`; return 1 if a row differs. `Malformed` for an invalid file."""
    parser = argparse.ArgumentParser(
        prog="weft verify", description="Verify policy verdicts against a table of expected results."
    )
    parser.add_argument("kind", choices=["netpol"], help="netpol: Kubernetes NetworkPolicy")
    parser.add_argument("file", type=Path, help="table of cases, JSON or gzipped JSON")
    parser.add_argument(
        "--packets",
        metavar="DATAPATH",
        help="send packets through a datapath: linux, ovs, ovs-vlan-bridge …; needs root",
    )
    parser.add_argument("--hosts", type=int, choices=[1, 2], default=1, help="with --packets: hosts for the pods (1)")
    args = parser.parse_args(argv)
    cases = read_cases(args.file)
    with _open_verifier(args.packets, hosts=args.hosts) as verifier:
        return _run(verifier, (step for case in cases for step in walk(case, verifier.node_of)))


def _open_verifier(datapath: str | None, *, hosts: int) -> AbstractContextManager[Verifier]:
    if datapath is None:
        return nullcontext(EngineVerifier())
    # Imported only with --packets: it loads the drivers and the whole lab.
    from weft.lab.verify.packets import open_packet_verifier  # noqa: PLC0415

    return open_packet_verifier(datapath, hosts=hosts)


def _run(verifier: Verifier, steps: Iterator[Step]) -> int:
    # A running count, because a table has tens of thousands of rows.
    agreed = verified = 0
    for step in steps:
        for difference in verifier.verify(step):
            verified += 1
            if difference is None:
                agreed += 1
            else:
                print(f"{step.name}: {difference}")
    skipped = verifier.skipped()
    print(f"agree {agreed} of {verified}" + (f"; skipped {skipped}" if skipped else ""))
    return 0 if agreed == verified else 1


def _difference(row: ExpectedVerdict, step: Step) -> str | None:
    flow = step.flow(row)
    verdict = step.engine.verdict(flow)
    actual = _word(allowed=verdict.ingress.action is Action.ALLOW), _word(allowed=verdict.egress.action is Action.ALLOW)
    if (*actual, _word(allowed=verdict.allowed)) == (row.ingress, row.egress, row.combined):
        return None
    return (
        f"{flow}: expected ingress {row.ingress}, egress {row.egress}; "
        f"engine: ingress {actual[0]} by {verdict.ingress.id}, egress {actual[1]} by {verdict.egress.id}"
    )


def _word(*, allowed: bool) -> str:
    return "allowed" if allowed else "blocked"
