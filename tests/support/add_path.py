"""Which modules of weft one CNI ADD passes through in the agent, from the request frame to the answer.

A real agent in a lab runs under a profile function (`python -m tests.support.add_path FLAG…` instead of
`weft.agent.main`). A context variable marks the task that serves the ADD; tasks, callbacks and work for the datapath
thread inherit it. So only calls on behalf of the ADD are counted, whatever else the agent does at the same time.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path
from types import FrameType

from weft.agent.cni import server
from weft.cni import wire
from weft.cni.wire import Answer, Call
from weft.lab.hosts import Host
from weft.lab.netlab import NetLab
from weft.lab.servers.processes import Child
from weft.lab.waiting import until
from weft.runtime.worker_thread import WorkerThread

_AGENT = "weft.agent.main"
_OUTPUT = "WEFT_ADD_PATH"
# The container whose ADD is traced.
_CONTAINER = "traced"
ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"
_MARKERS = re.compile(r"<!-- add-path -->\n(.*?)<!-- /add-path -->", re.DOTALL)

# What the ADD may pass through at most, without the three sets below.
MAX_MODULES = 35

# Plain values: structs, enums, constants, and pure helpers on them. They are read like types of the standard library.
VALUE_MODULES = frozenset(
    {
        "weft.cni.versions",
        "weft.domain.addresses",
        "weft.domain.desired.diff",
        "weft.domain.host_access.state",
        "weft.domain.ids",
        "weft.domain.model",
        "weft.domain.policy.model.identities",
        "weft.ports.datapath",
    }
)

# Pure codecs: they translate one kind of value into another, such as CNI requests, state items, nft elements and
# netlink messages. They keep no state. Those that read the kernel get a `weft.kernel.netlink.socket`, which is counted.
CODEC_MODULES = frozenset(
    {
        "weft.adapters.netns.kernel_state",
        "weft.adapters.netns.nft.anti_spoofing",
        "weft.adapters.netns.nft.entries",
        "weft.adapters.netns.nft.policy_epoch",
        "weft.adapters.netns.nft.policy_maps",
        "weft.adapters.netns.nft.prefix_lookup",
        "weft.adapters.netns.nft.service_chains",
        # Also flushes conntrack entries of UDP services; an ADD that changes no UDP service flushes nothing.
        "weft.adapters.netns.nft.service_maps",
        "weft.agent.store.log_lines",
        "weft.cni.arguments",
        "weft.cni.capabilities",
        # Parses labels; a misspelt one ends the ADD.
        "weft.domain.desired.placement",
        "weft.cni.json_reader",
        "weft.cni.portmap_bandwidth",
        "weft.cni.request",
        "weft.cni.result",
        "weft.cni.wire",
        "weft.domain.desired.segments",
        "weft.domain.desired.state",
        "weft.kernel.netlink.codec",
        "weft.kernel.netlink.link",
        "weft.kernel.netlink.neigh",
        "weft.kernel.netlink.nft_set",
        "weft.kernel.netlink.route",
    }
)

# Collections, whatever they hold: sets of numbers, multimaps, interval maps, reference counts, locks by key.
COLLECTION_MODULES = frozenset(
    {
        "weft.domain.host_access.refcounts",
        "weft.domain.ipam.address_cooldown",
        "weft.domain.ipam.allocator",
        "weft.domain.policy.model.multimap",
        "weft.domain.policy.policymap.delta_tracker",
        "weft.domain.policy.policymap.interval_map",
        "weft.domain.policy.policymap.stable_ids",
        "weft.runtime.keyed_lock",
    }
)

_is_traced: ContextVar[bool] = ContextVar("is_traced", default=False)
_called: set[str] = set()


class TracedHost(Host):
    """A host whose agent records the path of the ADD of one container."""

    @property
    def path_file(self) -> Path:
        return self.home / "add-path"

    def launch(self) -> None:
        os.environ[_OUTPUT] = str(self.path_file)
        super().launch()

    def _run(self, module: str, *flags: str, log: str) -> Child:
        return super()._run(__name__ if module == _AGENT else module, *flags, log=log)


async def measure(lab: NetLab) -> list[str]:
    """All modules of an ADD in the steady state: the tenant has an endpoint, so its netns and its block are there."""
    host = await lab.add(TracedHost, "one")
    await host.pod("first")
    await host.pod(_CONTAINER)
    await until(host.path_file.exists)
    return host.path_file.read_text().split()


def without_values(modules: Sequence[str]) -> list[str]:
    """The modules that are not plain values."""
    return [module for module in modules if module not in VALUE_MODULES]


def counted(modules: Sequence[str]) -> list[str]:
    """The modules that are neither values nor pure codecs nor collections: those that do the work of the ADD."""
    return [module for module in without_values(modules) if module not in CODEC_MODULES | COLLECTION_MODULES]


def read_documented(file: Path = ARCHITECTURE) -> list[str]:
    """The list in ARCHITECTURE.md."""
    found = _MARKERS.search(file.read_text())
    assert found is not None, f"{file} has no section between <!-- add-path --> and <!-- /add-path -->"
    return re.findall(r"`(weft\.[a-z0-9_.]+)`", found[1])


def write_documented(modules: Sequence[str], file: Path = ARCHITECTURE) -> None:
    """Replace the list in ARCHITECTURE.md."""
    lines = "".join(f"- `{module}`\n" for module in modules)
    file.write_text(_MARKERS.sub(f"<!-- add-path -->\n{lines}<!-- /add-path -->", file.read_text()))


def _profile(frame: FrameType, event: str, _: object) -> None:
    if event == "call" and _is_traced.get() and frame.f_code.co_name != "<module>":
        module = frame.f_globals.get("__name__", "")
        if module.startswith("weft."):
            _called.add(module)


def _trace_agent(output: Path) -> None:
    """Patch the agent so that the ADD of one container is recorded, and run it."""
    post = WorkerThread.post

    def decode_call(body: bytes) -> Call:
        call = wire.decode_call(body)
        environment = call.environment
        if environment.get("CNI_COMMAND") == "ADD" and environment.get("CNI_CONTAINERID") == _CONTAINER:
            _called.add(server.__name__)
            _is_traced.set(True)
        return call

    def encode_answer(answer: Answer) -> bytes:
        data = wire.encode_answer(answer)
        if _is_traced.get():
            _is_traced.set(False)
            # Renamed into place: the file must not be read half written.
            temporary = output.with_suffix(".new")
            temporary.write_text("\n".join(sorted(_called)))
            temporary.rename(output)
        return data

    def post_in_context(self: WorkerThread, work: Callable[[], None]) -> None:
        post(self, partial(copy_context().run, work))

    vars(server).update(decode_call=decode_call, encode_answer=encode_answer)
    type.__setattr__(WorkerThread, "post", post_in_context)
    # Before any thread is started: Python 3.11 cannot set the profile function of another thread.
    threading.setprofile(_profile)
    sys.setprofile(_profile)
    runpy.run_module(_AGENT, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _trace_agent(Path(os.environ[_OUTPUT]))
