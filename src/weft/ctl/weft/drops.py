"""`weft drops`: dropped packets of this node with the rules that dropped them, and per-rule counters."""

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
from weft.ctl.weft.agent_client import add_agent_flag, follow_agent, get_agent, inspect_agent

_DROPS = (
    Column("Time", "time"),
    Column("Tenant", "tenant"),
    Column("From", "from"),
    Column("To", "to"),
    Column("Service", "service"),
    Column("Rule", "rule"),
    Column("Reason", "reason"),
)
_COUNTERS = (
    Column("Tenant", "tenant"),
    Column("Rule", "rule"),
    Column("Direction", "direction"),
    Column("Action", "action"),
    Column("Packets", "packets"),
)


def main(argv: Sequence[str]) -> int:
    """Print drops or counters; a failure returns netctl's exit codes."""
    parser = argparse.ArgumentParser(
        prog="weft drops", description="Show dropped packets of this node and the rules that dropped them."
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--follow", "-f", action="store_true", help="follow new drops until Ctrl-C")
    mode.add_argument("--counters", "-c", action="store_true", help="show per-rule counters instead")
    parser.add_argument("--tenant", "-t", default="", help="only drops of this tenant")
    parser.add_argument(
        "--pod", "-p", default="", help="only drops from or to it: pod, namespace/pod, endpoint id or address"
    )
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
                drops = decode_rows(get_agent(args.agent, "/drops", tenant=args.tenant, pod=args.pod))
                _show(_DROPS, drops if args.json else [_flat(drop) for drop in drops], as_json=args.json)
    except Failure as failure:
        print(f"weft drops: {failure.message}", file=sys.stderr)
        return failure.exit_code
    return 0


def _counters(agent: str, tenant: str) -> Iterator[dict[str, Any]]:
    policy = inspect_agent(agent)["policy"]
    yield from (row for row in policy["rules"] if tenant in {"", row["tenant"]})
    if not tenant:
        # Drops without a rule, such as by spoofguard, are counted per node and not per tenant.
        reasons = ((rule, count) for rule, count in policy["reasons"].items() if count)
        yield from ({"rule": rule, "action": "dropped", "packets": count} for rule, count in reasons)
    if policy["truncated"]:
        print(f"weft drops: {policy['truncated']} more rules with smaller counters are not shown", file=sys.stderr)


def _follow(drops: Iterable[Mapping[str, Any]], as_json: bool) -> None:
    for drop in drops:
        if "ended" in drop:
            # The agent's last line: it stops, or this reader is too slow.
            raise CommandError(str(drop["ended"]))
        print(json.dumps(drop, ensure_ascii=False) if as_json else _line(_flat(drop)), flush=True)


def _line(row: Mapping[str, Any]) -> str:
    flow = f"{row['from']} -> {row['to']} {row['service']}"
    return f"{row['time']}  {row['tenant']}  {flow}  {row['rule']}: {row['reason']}"


def _flat(drop: Mapping[str, Any]) -> dict[str, Any]:
    """A drop as a table row."""
    moment = datetime.fromtimestamp(drop["at"], UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {**drop, "time": moment, "from": _format_end(drop["source"]), "to": _format_end(drop["target"])}


def _format_end(end: Mapping[str, Any]) -> str:
    name = end["pod"] or end["identity"]
    return end["address"] if name == end["address"] else f"{name} ({end['address']})"


def _show(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    # Wrapped columns on a terminal; one line per row in a pipe.
    elif sys.stdout.isatty():
        _print_rich_table(columns, rows)
    else:
        print(render.table(columns, [dict(row) for row in rows]), end="")


def _print_rich_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console  # noqa: PLC0415  slow to import, and only a terminal needs it
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(*(column.title for column in columns), box=None)
    for row in rows:
        # Text: names of rules must not be read as markup.
        table.add_row(*(Text(str(row.get(column.member, ""))) for column in columns))
    Console().print(table)
