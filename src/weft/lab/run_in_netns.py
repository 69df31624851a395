"""Runs a Python module as on a separate host: `python -m weft.lab.run_in_netns NETNS BOOT-ID MODULE ARGUMENT…`.

The process enters the network namespace, mounts the file BOOT-ID over the kernel's, and runs the module.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from weft.lab.namespaces import CLONE_NEWNS, MS_BIND, enter, mount, unshare

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def main() -> None:
    """Run the module; return when it ends."""
    namespace, boot_id, module, *arguments = sys.argv[1:]
    enter(Path(namespace))
    # Mount propagation stays as it is: pins of tenant netns must outlive this process.
    unshare(CLONE_NEWNS)
    # The agent detects a reboot by the boot id.
    mount(Path(boot_id), _BOOT_ID, flags=MS_BIND)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
