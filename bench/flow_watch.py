"""The time at which a switch has installed a flow, from `ovs-ofctl monitor`."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from types import TracebackType
from typing import Self

from weft.adapters.ovs.ovsdb.bridge import BRIDGE
from weft.lab.servers.openvswitch import Switch
from weft.lab.waiting import DEADLINE

_EVENT = b" event="
# A flow without effect: its event shows that the monitor is running.
_PROBE_FLOW = "table=250,reg15=1"


class FlowWatch:
    """Watches the flows of our bridge while the block runs."""

    def __init__(self, switch: Switch) -> None:
        command = ["ovs-ofctl", "-O", "OpenFlow14", "monitor", switch.management(BRIDGE), "watch:!initial"]
        environment = {**os.environ, "OVS_RUNDIR": str(switch.directory)}
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
        until = time.perf_counter() + DEADLINE
        while not self._has_more(within=0.1) and time.perf_counter() < until:
            switch.flows("add-flow", BRIDGE, f"{_PROBE_FLOW},actions=drop")
            switch.flows("del-flows", BRIDGE, _PROBE_FLOW)
        self.await_change()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate(timeout=DEADLINE)

    def await_change(self) -> float:
        """The `time.perf_counter` of the next change; further events of the same change are skipped."""
        if not self._has_more(within=DEADLINE) or _EVENT not in self._read():
            raise SystemExit("bench.flow_watch: the switch reports no change")
        at = time.perf_counter()
        while self._has_more(within=0.02):
            self._read()
        return at

    def _has_more(self, *, within: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            return bool(selector.select(within))

    def _read(self) -> bytes:
        return os.read(self._output, 1 << 16)

    @property
    def _output(self) -> int:
        assert self._process.stderr is not None
        return self._process.stderr.fileno()
