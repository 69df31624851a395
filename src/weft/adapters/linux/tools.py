"""What a person at the machine may ask of the kernel, whichever datapath is on it (`weft.ports.datapath`)."""

from __future__ import annotations

from pathlib import Path

from weft.adapters.linux.netns import Namespace, NamespaceDirectory
from weft.adapters.linux.survey import foreign_drops, probe_kernel


class KernelTools:
    """The part of `weft.ports.datapath.DatapathTools` that is the same for datapaths with devices of the kernel."""

    @staticmethod
    def probe() -> list[str]:
        """See `weft.ports.datapath.DatapathTools`."""
        return probe_kernel()

    @staticmethod
    def hazards() -> list[str]:
        """See `weft.ports.datapath.DatapathTools`."""
        return foreign_drops()

    @staticmethod
    def enter_workload(netns: Path) -> None:
        """See `weft.ports.datapath.DatapathTools`."""
        with Namespace.open(netns) as namespace:
            namespace.enter()

    @staticmethod
    def vacate(directory: Path) -> None:
        """See `weft.ports.datapath.DatapathTools`."""
        NamespaceDirectory(directory).remove()
