"""The constants of `weft.kernel.uapi` have the values of the installed kernel headers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from weft.kernel.uapi import conntrack, netlink, nf_tables, nflog, rtnetlink, tc
from weft.lab.waiting import DEADLINE

HEADERS: dict[ModuleType, tuple[str, ...]] = {
    netlink: ("sys/socket.h", "linux/netlink.h"),
    rtnetlink: (
        "sys/socket.h", "linux/if.h", "linux/ip.h", "linux/rtnetlink.h", "linux/if_link.h", "linux/if_addr.h",
        "linux/if_bridge.h", "linux/neighbour.h", "linux/fib_rules.h", "linux/veth.h",
    ),
    tc: ("linux/rtnetlink.h", "linux/pkt_sched.h", "linux/pkt_cls.h", "linux/tc_act/tc_mirred.h"),
    nf_tables: ("linux/netlink.h", "linux/netfilter.h", "linux/netfilter/nfnetlink.h", "linux/netfilter/nf_tables.h"),
    conntrack: ("linux/netfilter/nfnetlink.h", "linux/netfilter/nfnetlink_conntrack.h"),
    nflog: ("linux/netfilter/nfnetlink.h", "linux/netfilter/nfnetlink_log.h"),
}  # fmt: skip
# The first are internal to the kernel; the header defines the last with more bits than nla_type has.
NOT_IN_HEADERS = re.compile(r"CTA_FILTER_F_.*|NLA_TYPE_MASK")
COMPILER = shutil.which("cc")


def constants(module: ModuleType) -> dict[str, int]:
    return {name: value for name, value in vars(module).items() if name.isupper() and isinstance(value, int)}


def compile_and_run(directory: Path, headers: tuple[str, ...], names: list[str]) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    includes = "".join(f"#include <{header}>\n" for header in headers)
    prints = "".join(f'printf("%s %lld\\n", "{name}", (long long)(int)({name}));\n' for name in names)
    source = directory / "constants.c"
    source.write_text(f"#include <stdio.h>\n{includes}int main(void) {{\n{prints}return 0; }}\n")
    program = directory / "constants"
    built = subprocess.run(
        [COMPILER, "-fmax-errors=0", "-o", str(program), str(source)],
        capture_output=True, text=True, check=False, timeout=DEADLINE,
    )  # fmt: skip
    if built.returncode:
        return built
    return subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=DEADLINE)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler to read the kernel headers with")
@pytest.mark.parametrize("module", HEADERS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_constants_equal_those_of_the_headers(module: ModuleType, tmp_path: Path) -> None:
    ours = {name: value for name, value in constants(module).items() if not NOT_IN_HEADERS.fullmatch(name)}
    names = sorted(ours)
    result = compile_and_run(tmp_path, HEADERS[module], names)
    if result.returncode:
        # Headers older than a constant do not define it: leave it out, and compare the others.
        missing = set(re.findall(r"‘?'?(\w+)’?'? undeclared", result.stderr))
        assert missing, result.stderr
        assert len(missing) < len(names) / 4, missing
        names = [name for name in names if name not in missing]
        result = compile_and_run(tmp_path, HEADERS[module], names)
    assert not result.returncode, result.stderr
    theirs = {name: int(value) for name, value in (line.split() for line in result.stdout.splitlines())}
    assert {name: _signed(ours[name]) for name in names} == theirs


def _signed(value: int) -> int:
    """The value as a C int, which is how the headers' 32-bit handles print."""
    return (value & 0xFFFFFFFF) - (1 << 32 if value & 0x80000000 else 0)
