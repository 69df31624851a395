"""`weft uninstall-node`: take everything of ours off this machine. What others have there is not touched.

Who calls us goes first (the CNI configuration), then what carries packets, then what is remembered: killed at any line,
it is run again and finishes. It refuses while an agent runs, and, unless it is forced, while workloads are attached:
theirs would be cut, and nobody would be left whom their runtime could tell of their end.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.agent.store.attachment_store import WIRED
from weft.agent.store.attachment_wal import AttachmentWal, read_boot_id
from weft.cni.chains import CONF_DIR
from weft.cni.install import uninstall as uninstall_cni
from weft.domain.addresses import Address
from weft.domain.errors import Conflict, Unavailable
from weft.drivers import (
    OVS_DIR,
    DatapathSettings,
    LinuxDatapathSettings,
    OvsDatapathSettings,
    datapath_tools,
    open_datapath,
)

# What an agent keeps in its directory.
_NODES_OWN = ("ledger", "ledger.lock", "membership")
# What netmaster keeps below the agent's directory: in one of its own where the manifest starts it, beside the agent's
# things where `weft up` does.
_STORES = ("netmaster", "weft.db*", "store.sock")
_STORE_LOCKS = ("netmaster/weft.db.lock", "weft.db.lock")
_ANY = Address(4, 0x7F000001)
_VXLAN_PORT = 4789


def main(argv: Sequence[str]) -> int:
    """Tell what was done; 0 when nothing of ours is left."""
    parser = argparse.ArgumentParser(prog="weft uninstall-node", description="Take Weft off this machine.")
    parser.add_argument("--bin-dir", type=Path, default=Path("/opt/cni/bin"), help="where plugins are; /opt/cni/bin")
    parser.add_argument("--conf-dir", type=Path, default=CONF_DIR, help=f"where networks are; {CONF_DIR}")
    parser.add_argument("--run-dir", type=Path, default=Path("/run/weft"), help="that of netplugin; /run/weft")
    parser.add_argument("--data-dir", type=Path, default=Path("/var/lib/weft"), help="that of netplugin; /var/lib/weft")
    parser.add_argument("--datapath", choices=("linux", "ovs"), default="linux", help="that of netplugin; linux")
    parser.add_argument("--ovs-dir", type=Path, default=OVS_DIR, help=f"that of Open vSwitch's sockets; {OVS_DIR}")
    parser.add_argument("--with-store", action="store_true", help="remove netmaster's store too, if it is here")
    parser.add_argument("--force", action="store_true", help="cut off workloads that are attached")
    parser.add_argument("--stay", action="store_true", help="when all is done, wait to be told to end")
    args = parser.parse_args(argv)
    told = uninstall_node(
        bin_dir=args.bin_dir,
        conf_dir=args.conf_dir,
        run_dir=args.run_dir,
        data_dir=args.data_dir,
        datapath=_datapath_settings(args.datapath, netns=args.run_dir / "netns", switch=args.ovs_dir),
        with_store=args.with_store,
        force=args.force,
    )
    for line in told:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    if args.stay:
        ending = {signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, ending)
        signal.sigwait(ending)
    return 0


def uninstall_node(
    *,
    bin_dir: Path,
    conf_dir: Path,
    run_dir: Path,
    data_dir: Path,
    datapath: DatapathSettings,
    with_store: bool,
    force: bool,
) -> Iterator[str]:
    """Do it step by step; tells what was done. Nothing is done before all of it is known to be allowed."""
    if (data_dir / "ledger").exists():
        _check_unused(data_dir, force=force)
    if with_store:
        _check_no_store_served(data_dir)
    yield from uninstall_cni(bin_dir=bin_dir, conf_dir=conf_dir)
    with open_datapath(datapath) as opened:
        yield from opened.withdraw()
    datapath_tools(datapath.driver).vacate(datapath.directory)
    stores = sorted(path for pattern in _STORES for path in data_dir.glob(pattern)) if with_store else []
    for path in (run_dir, *(data_dir / name for name in _NODES_OWN), *stores):
        if path.is_dir():
            shutil.rmtree(path)
            yield f"removed {path}"
        elif path.exists():
            path.unlink()
            yield f"removed {path}"
    if data_dir.is_dir() and not any(data_dir.iterdir()):
        data_dir.rmdir()


def _datapath_settings(name: str, *, netns: Path, switch: Path) -> DatapathSettings:
    if name == "ovs":
        return OvsDatapathSettings(switch=switch, directory=netns, vtep=_ANY, vxlan_port=_VXLAN_PORT)
    return LinuxDatapathSettings(directory=netns, vtep=_ANY, vxlan_port=_VXLAN_PORT)


def _check_no_store_served(data_dir: Path) -> None:
    for lock in filter(Path.exists, (data_dir / name for name in _STORE_LOCKS)):
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Conflict(f"netmaster runs on this machine and serves {lock.parent}: end it first") from error


def _check_unused(data_dir: Path, *, force: bool) -> None:
    try:
        ledger = AttachmentWal(data_dir / "ledger", boot=read_boot_id())
    except Unavailable as error:
        raise Conflict(f"an agent runs on this machine, end it first: {error.message}") from error
    try:
        attached = [] if ledger.rebooted else [note for note in ledger if note.stage in WIRED]
    finally:
        ledger.close()
    if attached and not force:
        names = ", ".join(sorted(note.endpoint.container_id[:12] for note in attached)[:5])
        raise Conflict(
            f"{len(attached)} workloads are attached ({names} …): remove them first, or --force cuts them off"
        )
