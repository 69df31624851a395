"""Who is behind an uplink is heard on its wire, with the tag of its network; an uplink that is not there is told."""

from __future__ import annotations

import subprocess

import pytest

from weft.adapters.linux.netns import Namespace
from weft.adapters.ovs.announcing import announce
from weft.domain.errors import DatapathFault
from weft.testing.frames import is_from, tag_heard, wire_of
from weft.testing.waiting import DEADLINE

MAC = "02:02:0a:00:00:01"


def test_a_voice_is_heard_with_its_tag() -> None:
    for words in ("link add up0 type veth peer name up1", "link set up0 up", "link set up1 up"):
        subprocess.run(["ip", *words.split()], check=True, timeout=DEADLINE)
    with Namespace.current() as here, wire_of(here, interface="up1") as ear:
        announce({(MAC, 7)}, "up0")
        assert tag_heard(ear, is_from(MAC), within=DEADLINE) == 7


def test_an_uplink_that_is_not_there_is_told() -> None:
    with pytest.raises(DatapathFault, match="uplink up9: nobody can be announced there: No such device"):
        announce({(MAC, 7)}, "up9")
