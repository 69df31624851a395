"""How labs are called: by their datapath, the mode of their networks and how these are forwarded.

Such as `ovs-vlan-bridge`; what is left out is usual.
"""

from __future__ import annotations

from typing import Final

USUAL: Final = {"datapath": "linux", "netmode": "vxlan", "fwdmode": "routing"}


def lab_modes(name: str, **usual: str) -> dict[str, str]:
    """What a lab's name says, by the words of `open_lab`; `usual` is what is meant where it says nothing."""
    return USUAL | usual | dict(zip(USUAL, name.split("-"), strict=False))
