"""Runs one of our programs as on a machine of its own: `python -m weft.lab.run_in_netns NETNS BOOT-ID MODULE ARGUMENT…`.

The process enters the network namespace, sees the file BOOT-ID as the kernel's, and becomes the module.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from weft.lab.namespaces import CLONE_NEWNS, MS_BIND, enter, mount, unshare

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def main() -> None:
    """Never returns but by the module's own end."""
    namespace, boot_id, module, *arguments = sys.argv[1:]
    enter(Path(namespace))
    unshare(CLONE_NEWNS)  # mounts that are shared stay so: tenants' namespaces outlive this process
    mount(Path(boot_id), _BOOT_ID, flags=MS_BIND)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
