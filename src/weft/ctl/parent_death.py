"""Runs a module that ends with its parent: `python -m weft.ctl.parent_death PARENT MODULE ARGUMENT…`."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Ask the kernel for SIGTERM on the parent's death, even by SIGKILL; then run the module."""
    parent, module, *arguments = sys.argv[1:]
    # SIGTERM and not SIGKILL, so that the program shuts down cleanly.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != int(parent):
        return  # the parent died before prctl(2)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
