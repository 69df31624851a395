"""Both datapaths pass the same contract tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.drivers import DatapathSettings, LinuxDatapathSettings, OvsDatapathSettings
from weft.lab.servers.openvswitch import running_switch
from weft.testing.datapath_contract import VTEP, DatapathContract


class TestLinux(DatapathContract):
    @pytest.fixture
    def settings(self, isolated: None, tmp_path: Path) -> DatapathSettings:
        return LinuxDatapathSettings(directory=tmp_path / "netns", vtep=VTEP, vxlan_port=4789)


class TestOvs(DatapathContract):
    @pytest.fixture
    def settings(self, isolated: None, tmp_path: Path) -> Iterator[DatapathSettings]:
        with running_switch(tmp_path / "ovs") as switch:
            yield OvsDatapathSettings(switch=switch.directory, directory=tmp_path / "netns", vtep=VTEP, vxlan_port=4789)
