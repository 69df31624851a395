"""Runs the Kubernetes project's end-to-end tests, `e2e.test`, against a cluster of ours.

Its pods need an image of the project, which is assembled here from agnhost, built from the same source, and from
programs of this machine that the specs run inside: a shell, curl, wget, dig and netcat, with their libraries.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from xml.etree import ElementTree

from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.images import write_image
from tests.support.runtimes import make_root, run, run_checked

from weft.lab.servers.certificates import Authority
from weft.lab.waiting import DEADLINE

_PROGRAMS = {"dash": "sh", "curl": "curl", "dig": "dig", "getent": "getent", "nc.openbsd": "nc", "wget": "wget"}
_IMAGE = re.compile(r"\S+/(?:agnhost|busybox|glibc-dns-testing|pause):\S+")
_SKIPPED = "skipped"
PASSED = "passed"


class Spec(NamedTuple):
    """The result of one spec: `PASSED`, or the failure."""

    name: str
    result: str


async def known_specs(programs: Path, *, focus: str) -> list[str]:
    """The names of all specs that match a pattern."""
    with TemporaryDirectory() as report:
        flags = ("--provider=skeleton", "--kubeconfig=/dev/null", f"--report-dir={report}", "--ginkgo.dry-run")
        await run_checked(str(programs / "e2e.test"), *flags, f"--ginkgo.focus={focus}")
        return sorted(spec.name for spec in _read_report(Path(report)))


async def run_specs(
    cluster: Cluster, specs: Sequence[str], *, programs: Path, report: Path, within: float, at_once: int = 1
) -> list[Spec]:
    """Run the specs whose names have one of these in them, several at once, and return the result of each."""
    e2e_test, archive = programs / "e2e.test", cluster.lab.directory / "e2e_test.tar"
    names = _image_names(await run_checked(str(e2e_test), "--list-images"))
    await asyncio.to_thread(_write_image, archive, agnhost=programs / "agnhost")
    for node in cluster.nodes.values():
        await node.import_image(archive, *names)
    async with asyncio.TaskGroup() as runners:
        parts = [
            runners.create_task(
                _run_specs(cluster, specs[first::at_once], e2e_test=e2e_test, report=report / str(first), within=within)
            )
            for first in range(min(at_once, len(specs)))
        ]
    return sorted(spec for part in parts for spec in part.result())


async def _run_specs(
    cluster: Cluster, specs: Sequence[str], *, e2e_test: Path, report: Path, within: float
) -> list[Spec]:
    """Run specs one after the other. Several runs are independent: each spec has namespaces of its own."""
    ran = await run(
        str(e2e_test),
        f"--kubeconfig={cluster.kubeconfig}",
        f"--kubectl-path={cluster.programs / 'kubectl'}",
        "--provider=skeleton",
        "--disable-log-dump=true",
        f"--report-dir={report}",
        f"--ginkgo.focus={'|'.join(map(re.escape, specs))}",
        "--ginkgo.no-color",
        f"--ginkgo.timeout={within:.0f}s",
        within=within + DEADLINE,
    )
    (report / "output").write_text(ran.output)
    found = _read_report(report)
    assert found, ran.output[-4000:]
    return found


def _image_names(listing: str) -> list[str]:
    """The images of network specs, out of all that `e2e.test` lists."""
    return sorted(set(_IMAGE.findall(listing)))


def _write_image(archive: Path, *, agnhost: Path) -> None:
    """Write one image that serves as all of them."""
    applets = subprocess.check_output(["busybox", "--list"], text=True, timeout=DEADLINE).split()
    with TemporaryDirectory(dir=archive.parent) as directory:
        root = make_root(Path(directory), applets=applets)
        root.chmod(0o755)
        for program, inside in _PROGRAMS.items():
            _copy_program(root, program, inside)
        (root / "uploads").mkdir()
        porter = Authority(archive.parent / "porter").issue("localhost", subject="/CN=localhost")
        shutil.copy(porter.cert, root / "localhost.crt")  # agnhost serves TLS with it
        shutil.copy(porter.key, root / "localhost.key")
        shutil.copy(agnhost, root / "agnhost")
        (root / "agnhost-2").symlink_to("agnhost")
        write_image(archive, root, name="weft.test/e2e_test:1", entrypoint=("/agnhost",), command=("pause",))


def _copy_program(root: Path, program: str, inside: str) -> None:
    path = shutil.which(program)
    assert path is not None, f"scripts/install-system-packages kubernetes installs {program}"
    target = root / "bin" / inside
    target.unlink(missing_ok=True)
    shutil.copy(path, target)
    output = subprocess.run(["ldd", path], capture_output=True, text=True, check=True, timeout=DEADLINE).stdout
    for library in re.findall(r"(/\S+) \(0x", output):
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
            found.append(Spec(name, PASSED))
    return [each for each in found if each.name.startswith("[It]")]
