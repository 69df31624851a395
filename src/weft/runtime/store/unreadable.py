"""Shows what the store holds and nobody can read: in the log, as metrics and in REST answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.domain.cluster import Cluster
from weft.domain.ids import StoreKey
from weft.ports.store import Change, Listing, Revision
from weft.runtime.logs import Log

log = Log("store")

# Lines in the log for one listing or change, and entries in an answer: whoever writes garbage must not fill either.
_MAX_SHOWN = 50


class UnreadableKeys(Collector):
    """A subscriber of the mirror, behind the cluster, and a collector of Prometheus metrics."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # One line for each revision of a key, also when a new listing brings it again.
        self._logged: dict[StoreKey, Revision] = {}

    def replace(self, _: Listing) -> None:
        faults = self._cluster.faults
        self._logged = {key: revision for key, revision in self._logged.items() if key in faults}
        self._log(faults)

    def apply(self, change: Change) -> None:
        if self._cluster.faults or self._logged:
            self._log(event.key for event in change.events)

    def _log(self, keys: Iterable[StoreKey]) -> None:
        new: list[StoreKey] = []
        for key in keys:
            fault = self._cluster.faults.get(key)
            if fault is None:
                self._logged.pop(key, None)
            elif self._logged.get(key) != fault.revision:
                self._logged[key] = fault.revision
                new.append(key)
        for key in new[:_MAX_SHOWN]:
            fault = self._cluster.faults[key]
            log.warning("unreadable key in the store", key=key[:200], revision=fault.revision, reason=fault.reason)
        if len(new) > _MAX_SHOWN:
            log.warning("more unreadable keys in the store", count=len(new) - _MAX_SHOWN)

    def show(self) -> list[str]:
        """The unreadable keys with their reasons; the last line says how many are left out."""
        faults = self._cluster.faults
        shown = [f"{key[:200]}: {fault.reason}" for key, fault in sorted(faults.items())[:_MAX_SHOWN]]
        return shown + ([f"{len(faults) - len(shown)} more"] if len(faults) > len(shown) else [])

    def collect(self) -> Iterator[Metric]:
        errors = CounterMetricFamily(
            "weft_store_decode_errors",
            "Documents of the store that could not be read, by kind; once for each revision of a key",
            labels=("kind",),
        )
        for kind, count in self._cluster.decode_errors.items():
            errors.add_metric((kind,), count)
        yield errors
        yield GaugeMetricFamily(
            "weft_store_unreadable_keys", "Keys of the store that cannot be read now", value=len(self._cluster.faults)
        )
