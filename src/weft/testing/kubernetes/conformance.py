"""The Kubernetes project's own end-to-end tests as a judge: `e2e.test` against a cluster of ours.

Its pods want an image of the project, which is put together here from agnhost, built from the same source, and from the
programs of this machine that its specs run inside: a shell, curl, dig and netcat, with the libraries they need.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from xml.etree import ElementTree

from weft.testing.kubernetes.cluster import Cluster
from weft.testing.kubernetes.images import write_image
from weft.testing.runtimes import make_root, must, run
from weft.testing.waiting import DEADLINE

_PROGRAMS = {"dash": "sh", "curl": "curl", "dig": "dig", "getent": "getent", "nc.openbsd": "nc"}
_IMAGE = re.compile(r"\S+/(?:agnhost|busybox|glibc-dns-testing|pause):\S+")
_SKIPPED = "skipped"


class Spec(NamedTuple):
    """How one of the judge's specs ended: with `passed`, `skipped`, or what went wrong."""

    name: str
    outcome: str


async def judge(cluster: Cluster, *, programs: Path, focus: str, skip: str, report: Path, within: float) -> list[Spec]:
    """Run the specs whose names match one pattern and not the other, one by one, and tell how each of them ended."""
    judging, archive = programs / "e2e.test", cluster.lab.directory / "judging.tar"
    names = _image_names(await must(str(judging), "--list-images"))
    await asyncio.to_thread(_write_image, archive, agnhost=programs / "agnhost")
    for node in cluster.nodes.values():
        await node.import_image(archive, *names)
    ran = await run(
        str(judging),
        f"--kubeconfig={cluster.kubeconfig}",
        f"--kubectl-path={cluster.programs / 'kubectl'}",
        "--provider=skeleton",
        "--disable-log-dump=true",
        f"--report-dir={report}",
        f"--ginkgo.focus={focus}",
        f"--ginkgo.skip={skip}",
        "--ginkgo.no-color",
        f"--ginkgo.timeout={within:.0f}s",
        within=within + DEADLINE,
    )
    specs = _read_report(report)
    assert specs, ran.output[-4000:]
    return specs


def _image_names(told: str) -> list[str]:
    """The images that specs on networks want, of all that the judge names."""
    return sorted(set(_IMAGE.findall(told)))


def _write_image(archive: Path, *, agnhost: Path) -> None:
    """One image that serves for all of them."""
    applets = subprocess.check_output(["busybox", "--list"], text=True, timeout=DEADLINE).split()
    with TemporaryDirectory(dir=archive.parent) as directory:
        root = make_root(Path(directory), applets=applets)
        root.chmod(0o755)
        for program, inside in _PROGRAMS.items():
            _copy_program(root, program, inside)
        (root / "uploads").mkdir()
        shutil.copy(agnhost, root / "agnhost")
        (root / "agnhost-2").symlink_to("agnhost")
        write_image(archive, root, name="weft.test/judging:1", entrypoint=("/agnhost",), command=("pause",))


def _copy_program(root: Path, program: str, inside: str) -> None:
    path = shutil.which(program)
    assert path is not None, f"scripts/install-system-packages kubernetes installs {program}"
    target = root / "bin" / inside
    target.unlink(missing_ok=True)
    shutil.copy(path, target)
    told = subprocess.run(["ldd", path], capture_output=True, text=True, check=True, timeout=DEADLINE).stdout
    for library in re.findall(r"(/\S+) \(0x", told):
        place = root / library.strip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, place)


def _read_report(directory: Path) -> list[Spec]:
    (path,) = directory.glob("junit*.xml")
    found = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = case.get("name", "")
        failure = case.find("failure")
        if failure is None:
            failure = case.find("error")
        if failure is not None:
            found.append(Spec(name, failure.get("message") or (failure.text or "")[:500]))
        elif case.find(_SKIPPED) is None and case.get("status") != _SKIPPED:
            found.append(Spec(name, "passed"))
    return [each for each in found if each.name.startswith("[It]")]
