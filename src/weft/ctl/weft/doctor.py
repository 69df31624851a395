"""`weft doctor`: checks this node and suggests fixes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from weft.cni.chains import CONF_DIR
from weft.ctl.weft.agent_client import add_agent_flag
from weft.ctl.weft.checks import Check, Health, as_json, check_all
from weft.drivers import OVS_DIR, datapath_tools

EXIT_FAILED = 1
_MARKS = {Health.OK: "ok     ", Health.WARNING: "warning", Health.FAILED: "FAILED "}


def main(argv: Sequence[str]) -> int:
    """Run the checks; return 1 if one failed. Warnings do not count."""
    parser = argparse.ArgumentParser(prog="weft doctor", description="Check this node.")
    parser.add_argument("--json", "-j", action="store_true", help="print JSON")
    parser.add_argument("--datapath", choices=("linux", "ovs"), default="linux", help="netplugin's datapath (linux)")
    parser.add_argument(
        "--ovs-dir", type=Path, default=OVS_DIR, help=f"directory of Open vSwitch's sockets ({OVS_DIR})"
    )
    parser.add_argument("--conf-dir", type=Path, default=CONF_DIR, help=f"directory of CNI networks ({CONF_DIR})")
    parser.add_argument("--timeout", type=float, default=2.0, metavar="SECONDS", help="timeout of each reply (2)")
    add_agent_flag(parser)
    args = parser.parse_args(argv)
    checks: list[Check] = []
    tools = datapath_tools(args.datapath)
    # Printed one by one: later checks may take seconds.
    for check in check_all(args.agent, tools, conf_dir=args.conf_dir, switch=args.ovs_dir, within=args.timeout):
        checks.append(check)
        if not args.json:
            print(f"{_MARKS[check.health]} {check.name}: {check.text}", flush=True)
            if check.hint:
                print(f"        -> {check.hint}")
    if args.json:
        print(as_json(checks))
    return EXIT_FAILED if any(check.health is Health.FAILED for check in checks) else 0
