"""`weft trace SRC DST PROTO/PORT`: explains the policy verdict of a flow, and which rule would change it.

With `--packet` this node's agent explains it instead of netmaster, and a probe is sent (`packet_trace`). With
`--datapath` the agent also traces the flow in its datapath (`ofproto/trace`, so Open vSwitch only) and sends nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from weft.ctl import render
from weft.ctl.client import Client, Connection, decode_row, is_true
from weft.ctl.failures import Failure
from weft.ctl.weft.agent_client import add_agent_flag, get_agent

EXIT_BLOCKED = 1


def main(argv: Sequence[str]) -> int:
    """Return 0 if the flow is allowed and 1 if it is blocked; a failure returns netctl's codes 2 to 4.

    With `--datapath`: 0 if engine and datapath agree, 1 if they differ.
    With `--packet`: 0 if engine and packet agree, 1 if they differ, 6 if the packet is lost.
    """
    parser = argparse.ArgumentParser(prog="weft trace", description="Explain the policy verdict of a flow.")
    parser.add_argument("source", metavar="SRC", help="an endpoint (key, id, container id or name) or an address")
    parser.add_argument("target", metavar="DST", help="as SRC")
    parser.add_argument("service", metavar="PROTO/PORT", help="tcp/80, udp/53, icmp …")
    parser.add_argument("--tenant", "-t", default="", help="tenant of an address, if several tenants have it")
    parser.add_argument("--ipv6", "-6", action="store_const", const="6", help="trace IPv6")
    parser.add_argument("--json", "-j", action="store_true", help="print the explanation as JSON")
    # As netctl, with the same variables.
    parser.add_argument("--netmaster", default=os.environ.get("NETMASTER", "http://127.0.0.1:9999"), metavar="URL")
    parser.add_argument(
        "--cacert",
        default=os.environ.get("NETCTL_CACERT", ""),
        metavar="FILE",
        help="CA certificates to verify netmaster's with (NETCTL_CACERT)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        default=is_true(os.environ.get("INSECURE", "")),
        help="do not verify netmaster's certificate (INSECURE)",
    )
    parser.add_argument("--packet", action="store_true", help="send a probe from SRC, a workload of this node")
    parser.add_argument(
        "--datapath", action="store_true", help="trace the flow in the datapath of this node, which must run SRC"
    )
    add_agent_flag(parser)
    args = parser.parse_args(argv)
    try:
        if args.datapath:
            return _trace_datapath(args)
        return _trace_packet(args) if args.packet else _trace(args)
    except Failure as failure:
        print(f"weft trace: {failure.message}", file=sys.stderr)
        # 1 means blocked here, not a usage error.
        return max(failure.exit_code, 2)


def _trace_packet(args: argparse.Namespace) -> int:
    from weft.ctl.weft.packet_trace import trace_packet  # noqa: PLC0415  slow to import

    code, document, text = trace_packet(args)
    print(render.json_document(document) if args.json else text)
    return code


def _trace_datapath(args: argparse.Namespace) -> int:
    query = {"src": args.source, "dst": args.target, "service": args.service, "version": args.ipv6 or ""}
    traced = cast("dict[str, Any]", decode_row(get_agent(args.agent, "/trace", **query, datapath="1")))
    explanation, datapath = traced["explanation"], traced["datapath"]
    agree = explanation["allowed"] is datapath["passes"]
    # For a drop the rule must be the same too; for a passing flow the datapath names a port instead.
    agree = agree and (datapath["passes"] or datapath["by"] == explanation["decidedBy"])
    if args.json:
        print(render.json_document({"engine": explanation, "datapath": datapath, "agree": agree}))
    else:
        verdict = "ALLOWED" if explanation["allowed"] else "BLOCKED"
        passes = f"forwarded through {datapath['by']}"
        drops = f"dropped by {datapath['by']}: {datapath['reason']}"
        print(f"{explanation['source']} -> {explanation['target']} {explanation['service']}")
        print(f"  engine: {verdict} by {explanation['decidedBy']}")
        print(f"  datapath: {passes if datapath['passes'] else drops}")
        print(f"  they {'AGREE' if agree else 'DIFFER'}")
    return 0 if agree else EXIT_BLOCKED


def _trace(args: argparse.Namespace) -> int:
    query = {"src": args.source, "dst": args.target, "service": args.service}
    query |= {"tenant": args.tenant} if args.tenant else {}
    query |= {"version": args.ipv6} if args.ipv6 else {}
    connection = Connection(url=args.netmaster, cacert=args.cacert, insecure=args.insecure)
    client = Client(connection, environment=os.environ)
    explanation = decode_row(client.request("GET", "/api/v1/trace", query=query))
    print(render.json_document(explanation) if args.json else "\n".join(_format(explanation)))
    return 0 if explanation.get("allowed") else EXIT_BLOCKED


def _format(explanation: Mapping[str, Any]) -> Iterator[str]:
    verdict = "ALLOWED" if explanation.get("allowed") else "BLOCKED"
    yield f"{explanation['source']} -> {explanation['target']} {explanation['service']}: {verdict}"
    yield f"  decided by {explanation['decidedBy']}"
    # In the order in which a packet meets them.
    for name in ("egress", "ingress"):
        side = cast("Mapping[str, Any]", explanation[name])
        word = "allows" if side.get("allowed") else "blocks"
        yield f"  {name} of {side['identity']}: {side['decidedBy']} {word}"
        for rule in side.get("considered", ()):
            yield f"    {_rule(rule)}"
        if side.get("audit"):
            yield f"    with audit rules enforced: {side['audit']['rule']} would {side['audit']['action']}"
    if nearest := explanation.get("nearest"):
        change = "block" if explanation.get("allowed") else "allow"
        yield f"  nearest rule that would {change} it: {nearest['rule']}, but {' and '.join(nearest['misses'])}"


def _rule(rule: Mapping[str, Any]) -> str:
    audit = " (audit)" if rule.get("audit") else ""
    match = "matches" if not rule.get("misses") else "no match: " + " and ".join(rule["misses"])
    return f"{rule['rule']} {rule['action']} priority {rule['priority']}{audit}: {match}"
