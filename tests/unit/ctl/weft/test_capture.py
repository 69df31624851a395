"""Which workload `weft capture` means, and the file that it writes."""

from __future__ import annotations

import struct

import pytest

from weft.ctl.weft import pcap
from weft.ctl.weft.capture import find_port, main
from weft.domain.errors import Conflict, NotFound


def port(endpoint: str, container: str, name: str, *, device: str = "wp1") -> dict[str, str]:
    return {"endpointID": endpoint, "containerID": container, "containerName": name, "device": device}


PORTS = [
    port("c0ffee", "c0ffee", "shop/web"),
    port("c0de", "c0de", "blog/web"),
    port("c0de-net1", "c0de", "blog/db"),
    port("beef", "beef", "", device=""),
]


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [("c0ffee", "c0ffee"), ("c0f", "c0ffee"), ("shop/web", "c0ffee"), ("db", "c0de-net1"), ("c0de-net1", "c0de-net1")],
)
def test_a_workload_is_found_by_what_people_know(text: str, endpoint: str) -> None:
    assert find_port(PORTS, text)["endpointID"] == endpoint


@pytest.mark.parametrize("text", ["nothing", "", "beef", "eb"])
def test_what_is_not_here_is_told_with_what_is(text: str) -> None:
    with pytest.raises(NotFound, match="it has c0de, c0de-net1, c0ffee"):
        find_port(PORTS, text)


@pytest.mark.parametrize("text", ["web", "c0", "c0de"])
def test_what_may_mean_several_is_refused(text: str) -> None:
    with pytest.raises(Conflict, match="c0de"):
        find_port(PORTS, text)


def test_the_file_is_as_analysers_read_it() -> None:
    assert struct.unpack("=IHHiIII", pcap.file_header()) == (0xA1B23C4D, 2, 4, 0, 0, pcap.LONGEST, 1)
    written = pcap.record(b"abc", length=1500, at_ns=1_700_000_000_123_456_789)
    assert struct.unpack("=IIII3s", written) == (1_700_000_000, 123_456_789, 3, 1500, b"abc")


@pytest.mark.parametrize("flag", ["--count", "--seconds"])
def test_bounds_are_positive(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["pod", flag, "0"])
    assert end.value.code == 2
    assert "must be 1 or more" in capsys.readouterr().err


def test_an_agent_that_is_away_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pod", "--agent", "127.0.0.1:1"]) == 2
    assert "is netplugin running here?" in capsys.readouterr().err
    assert main(["pod", "--agent", "nonsense"]) == 1
