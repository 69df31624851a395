"""`weft doctor`: is this node well, and if not, what is to be done?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from weft.cni.chains import CONF_DIR
from weft.ctl.weft.agent_client import add_agent_flag
from weft.ctl.weft.checks import Check, Health, as_json, examine
from weft.drivers import OVS_DIR, datapath_tools

EXIT_UNWELL = 1
_MARKS = {Health.WELL: "ok     ", Health.WARNING: "warning", Health.FAILED: "FAILED "}


def main(argv: Sequence[str]) -> int:
    """0 when nothing failed, 1 otherwise; warnings alone leave it at 0."""
    parser = argparse.ArgumentParser(prog="weft doctor", description="Check this node.")
    parser.add_argument("--json", "-j", action="store_true", help="print JSON")
    parser.add_argument("--datapath", choices=("linux", "ovs"), default="linux", help="that of netplugin (linux)")
    parser.add_argument("--ovs-dir", type=Path, default=OVS_DIR, help=f"that of Open vSwitch's sockets ({OVS_DIR})")
    parser.add_argument("--conf-dir", type=Path, default=CONF_DIR, help=f"where CNI networks are ({CONF_DIR})")
    parser.add_argument("--timeout", type=float, default=2.0, metavar="SECONDS", help="for each answer (2)")
    add_agent_flag(parser)
    args = parser.parse_args(argv)
    found: list[Check] = []
    tools = datapath_tools(args.datapath)
    for check in examine(args.agent, tools, conf_dir=args.conf_dir, switch=args.ovs_dir, within=args.timeout):
        found.append(check)
        if not args.json:
            print(f"{_MARKS[check.health]} {check.name}: {check.text}", flush=True)
            if check.hint:
                print(f"        -> {check.hint}")
    if args.json:
        print(as_json(found))
    return EXIT_UNWELL if any(check.health is Health.FAILED for check in found) else 0
