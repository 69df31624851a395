"""Which workload `weft capture` means, and the file that it writes."""

from __future__ import annotations

import struct

import pytest

from weft.ctl.weft.capture import find_port, main, pcap_header, pcap_record
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
def test_a_workload_is_found_by_any_of_its_names(text: str, endpoint: str) -> None:
    assert find_port(PORTS, text)["endpointID"] == endpoint


@pytest.mark.parametrize("text", ["nothing", "", "beef", "eb"])
def test_an_unknown_workload_is_reported_with_the_known_ones(text: str) -> None:
    with pytest.raises(NotFound, match="it has c0de, c0de-net1, c0ffee"):
        find_port(PORTS, text)


@pytest.mark.parametrize("text", ["web", "c0", "c0de"])
def test_an_ambiguous_name_is_rejected(text: str) -> None:
    with pytest.raises(Conflict, match="c0de"):
        find_port(PORTS, text)


def test_the_file_is_valid_pcap() -> None:
    assert struct.unpack("=IHHiIII", pcap_header()) == (0xA1B23C4D, 2, 4, 0, 0, 262_144, 1)
    record = pcap_record(b"abc", at_ns=1_700_000_000_123_456_789)
    assert struct.unpack("=IIII3s", record) == (1_700_000_000, 123_456_789, 3, 3, b"abc")


@pytest.mark.parametrize("flag", ["--count", "--seconds"])
def test_bounds_are_positive(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["pod", flag, "0"])
    assert end.value.code == 2
    assert "must be 1 or more" in capsys.readouterr().err


def test_an_unreachable_agent_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pod", "--agent", "127.0.0.1:1"]) == 2
    assert "is netplugin running here?" in capsys.readouterr().err
    assert main(["pod", "--agent", "nonsense"]) == 1
