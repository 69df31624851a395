"""`weft uninstall-node`: removes everything of Weft from this machine, and nothing of others.

The CNI configuration goes first, then the datapath, then the files: after a kill at any line, another run finishes the
work. It refuses to run while an agent runs and, unless forced, while endpoints are attached: they would be
disconnected, and no CNI plugin would be left for their DEL.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.agent.store.attachment_store import FILE_NAME, FORMER_NAME, HAS_PORT, AttachmentWal, read_boot_id
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

# Files of an agent in --data-dir.
_AGENT_FILES = (FILE_NAME, "attachments.lock", "membership")
# Files of netmaster in --data-dir: in a directory of their own if the manifest starts it, else, with `weft up`, not.
_STORE_FILES = ("netmaster", "weft.db*", "store.sock")
_STORE_LOCKS = ("netmaster/weft.db.lock", "weft.db.lock")
# Required by the settings of a datapath, and not used by an uninstall.
_ANY = Address(4, 0x7F000001)
_VXLAN_PORT = 4789


def main(argv: Sequence[str]) -> int:
    """Print each step; 0 when nothing of ours is left."""
    parser = argparse.ArgumentParser(prog="weft uninstall-node", description="Remove Weft from this machine.")
    parser.add_argument(
        "--bin-dir", type=Path, default=Path("/opt/cni/bin"), help="directory of CNI plugins; /opt/cni/bin"
    )
    parser.add_argument("--conf-dir", type=Path, default=CONF_DIR, help=f"directory of CNI configurations; {CONF_DIR}")
    parser.add_argument("--run-dir", type=Path, default=Path("/run/weft"), help="netplugin's --run-dir; /run/weft")
    parser.add_argument(
        "--data-dir", type=Path, default=Path("/var/lib/weft"), help="netplugin's --data-dir; /var/lib/weft"
    )
    parser.add_argument("--datapath", choices=("linux", "ovs"), default="linux", help="netplugin's datapath; linux")
    parser.add_argument("--ovs-dir", type=Path, default=OVS_DIR, help=f"directory of Open vSwitch's sockets; {OVS_DIR}")
    parser.add_argument("--with-store", action="store_true", help="remove netmaster's store too, if it is here")
    parser.add_argument("--force", action="store_true", help="disconnect attached endpoints")
    parser.add_argument(
        "--wait-forever",
        action="store_true",
        help="when done, wait for SIGTERM; for a DaemonSet, whose pods must not exit",
    )
    args = parser.parse_args(argv)
    steps = uninstall_node(
        bin_dir=args.bin_dir,
        conf_dir=args.conf_dir,
        run_dir=args.run_dir,
        data_dir=args.data_dir,
        datapath=_datapath_settings(args.datapath, netns=args.run_dir / "netns", switch=args.ovs_dir),
        with_store=args.with_store,
        force=args.force,
    )
    for line in steps:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    if args.wait_forever:
        signals = {signal.SIGTERM, signal.SIGINT}
        # sigwait(3) takes only blocked signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        signal.sigwait(signals)
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
    """Uninstall step by step, and yield a line for each. All checks come before the first step."""
    if any((data_dir / name).exists() for name in (FILE_NAME, FORMER_NAME)):
        _check_unused(data_dir, force=force)
    if with_store:
        _check_no_store_served(data_dir)
    yield from uninstall_cni(bin_dir=bin_dir, conf_dir=conf_dir)
    with open_datapath(datapath) as opened:
        yield from opened.uninstall()
    datapath_tools(datapath.driver).remove_netns_dir(datapath.directory)
    stores = sorted(path for pattern in _STORE_FILES for path in data_dir.glob(pattern)) if with_store else []
    for path in (run_dir, *(data_dir / name for name in _AGENT_FILES), *stores):
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
                # netmaster holds this lock for as long as it has the database open.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Conflict(f"netmaster runs on this machine and serves {lock.parent}: stop it first") from error


def _check_unused(data_dir: Path, *, force: bool) -> None:
    try:
        attachments = AttachmentWal(data_dir / FILE_NAME, boot=read_boot_id())
    except Unavailable as error:
        raise Conflict(f"an agent runs on this machine, stop it first: {error.message}") from error
    try:
        # After a reboot the kernel has none of them any more.
        attached = [] if attachments.rebooted else [each for each in attachments if each.stage in HAS_PORT]
    finally:
        attachments.close()
    if attached and not force:
        names = ", ".join(sorted(each.endpoint.container_id[:12] for each in attached)[:5])
        raise Conflict(
            f"{len(attached)} workloads are attached ({names} …): remove them first, or disconnect them with --force"
        )
