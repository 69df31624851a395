"""What a person at the machine may ask of the kernel, whichever datapath is on it (`weft.ports.datapath`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weft.adapters.netns.diagnostics import foreign_drops, probe_kernel
from weft.domain.ids import TenantName
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.ports.datapath import Finding


class KernelTools:
    """`weft.ports.datapath.DatapathTools` as the kernel has them: host ends are in tenants' spaces, there is no switch.

    A datapath with a switch has its own words for what is different there.
    """

    @staticmethod
    def probe() -> list[str]:
        """See `weft.ports.datapath.DatapathTools`."""
        return probe_kernel()

    @staticmethod
    def hazards() -> list[str]:
        """See `weft.ports.datapath.DatapathTools`."""
        return foreign_drops()

    @staticmethod
    def examine(switch: Path) -> Iterator[Finding]:  # noqa: ARG004  there is none
        """See `weft.ports.datapath.DatapathTools`."""
        yield from ()

    @staticmethod
    def enter(directory: Path, tenant: TenantName) -> None:
        """See `weft.ports.datapath.DatapathTools`."""
        with NamespaceDirectory(directory).open(tenant) as namespace:
            namespace.enter()

    @staticmethod
    def enter_host_ends(directory: Path, tenant: TenantName) -> None:
        """See `weft.ports.datapath.DatapathTools`."""
        KernelTools.enter(directory, tenant)

    @staticmethod
    def enter_workload(netns: Path) -> None:
        """See `weft.ports.datapath.DatapathTools`."""
        with Namespace.open(netns) as namespace:
            namespace.enter()

    @staticmethod
    def vacate(directory: Path) -> None:
        """See `weft.ports.datapath.DatapathTools`."""
        NamespaceDirectory(directory).remove()
