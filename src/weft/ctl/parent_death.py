"""Runs one of our programs for as long as its parent lives: `python -m weft.ctl.parent_death PARENT MODULE ARGUMENT…`."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the module, after the kernel was asked to end this process with its parent, whatever ends that."""
    parent, module, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != int(parent):
        return  # it died before the kernel could be asked
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
