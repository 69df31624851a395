"""`weft drops`: what was refused on this node, by which rule, and how often each rule was met."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from weft.ctl import render
from weft.ctl.client import decode_rows
from weft.ctl.failures import CommandError, Failure
from weft.ctl.render import Column
from weft.ctl.weft.agent_client import add_agent_flag, ask_agent, follow_agent, inspect_agent

_DROPS = (
    Column("Time", "time"),
    Column("Tenant", "tenant"),
    Column("From", "from"),
    Column("To", "to"),
    Column("Service", "service"),
    Column("Rule", "rule"),
    Column("Why", "reason"),
)
_COUNTERS = (
    Column("Tenant", "tenant"),
    Column("Rule", "rule"),
    Column("Direction", "direction"),
    Column("Deed", "deed"),
    Column("Packets", "packets"),
)


def main(argv: Sequence[str]) -> int:
    """0 when the agent has answered; what it cannot be asked ends with netctl's codes."""
    parser = argparse.ArgumentParser(prog="weft drops", description="Say what was refused on this node, and why.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--follow", "-f", action="store_true", help="go on with those to come, until Ctrl-C")
    what.add_argument("--counters", "-c", action="store_true", help="how often each rule was met instead")
    parser.add_argument("--tenant", "-t", default="", help="of this tenant only")
    parser.add_argument("--pod", "-p", default="", help="to or from it: pod, namespace/pod, endpoint id or address")
    parser.add_argument("--json", "-j", action="store_true", help="print JSON, one object per line")
    add_agent_flag(parser)
    args = parser.parse_args(argv)
    try:
        with suppress(KeyboardInterrupt):
            if args.counters:
                _show(_COUNTERS, list(_counters(args.agent, args.tenant)), as_json=args.json)
            elif args.follow:
                _follow(follow_agent(args.agent, "/drops", follow="1", tenant=args.tenant, pod=args.pod), args.json)
            else:
                drops = decode_rows(ask_agent(args.agent, "/drops", tenant=args.tenant, pod=args.pod))
                _show(_DROPS, drops if args.json else [_flat(drop) for drop in drops], as_json=args.json)
    except Failure as failure:
        print(f"weft drops: {failure.message}", file=sys.stderr)
        return failure.exit_code
    return 0


def _counters(agent: str, tenant: str) -> Iterator[dict[str, Any]]:
    policy = inspect_agent(agent)["policy"]
    yield from (row for row in policy["rules"] if tenant in {"", row["tenant"]})
    if not tenant:
        met = ((rule, count) for rule, count in policy["reasons"].items() if count)
        yield from ({"rule": rule, "deed": "refused", "packets": count} for rule, count in met)
    if policy["leftOut"]:
        print(f"weft drops: {policy['leftOut']} more rules that were met less often", file=sys.stderr)


def _follow(drops: Iterable[Mapping[str, Any]], as_json: bool) -> None:
    for drop in drops:
        if "ended" in drop:
            raise CommandError(str(drop["ended"]))
        print(json.dumps(drop, ensure_ascii=False) if as_json else _line(_flat(drop)), flush=True)


def _line(row: Mapping[str, Any]) -> str:
    flow = f"{row['from']} -> {row['to']} {row['service']}"
    return f"{row['time']}  {row['tenant']}  {flow}  {row['rule']}: {row['reason']}"


def _flat(drop: Mapping[str, Any]) -> dict[str, Any]:
    """A drop as the cells of a table."""
    moment = datetime.fromtimestamp(drop["at"], UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {**drop, "time": moment, "from": _end(drop["source"]), "to": _end(drop["target"])}


def _end(end: Mapping[str, Any]) -> str:
    name = end["pod"] or end["identity"]
    return end["address"] if name == end["address"] else f"{name} ({end['address']})"


def _show(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    elif sys.stdout.isatty():
        _show_to_a_person(columns, rows)
    else:
        print(render.table(columns, [dict(row) for row in rows]), end="")


def _show_to_a_person(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console  # noqa: PLC0415  most who call this are programs, and need not wait for it
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(*(column.title for column in columns), box=None)
    for row in rows:
        table.add_row(*(Text(str(row.get(column.member, ""))) for column in columns))
    Console().print(table)
