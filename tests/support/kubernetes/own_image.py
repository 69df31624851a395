"""Build our container image from this machine's Python, the working tree and Weft's dependencies.

It has the layout of packaging/Containerfile that the manifests rely on: the programs are in the path, and the CNI
plugin is at `SHIM`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.kubernetes.images import write_image

import weft
from weft.cni.install import build_program

SHIM = "/usr/libexec/weft/weft-cni"
_LIBRARY = "usr/lib/weft"
_PROGRAMS = ("netmaster", "netplugin", "netdns", "netctl", "weft")
_NFTABLES = "libnftables.so.1"
_NEEDLESS = (
    "*.opt-?.pyc", "_tkinter*", "config-*", "dist-packages", "distutils", "ensurepip", "idlelib", "lib2to3",
    "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo",
)  # fmt: skip


def write_own_image(archive: Path, *, name: str, version: str = weft.__version__) -> None:
    """Write an archive for `ctr image import` under a full name; its Weft reports this version."""
    with TemporaryDirectory(prefix="weft-image-") as folder:
        root = Path(folder)
        for place in ("bin", "etc", "proc", "sys", "run", "var", "dev"):
            (root / place).mkdir()
        (root / "tmp").mkdir(mode=0o1777)
        (root / "var" / "run").symlink_to("/run")
        _copy_file(Path("/etc/protocols"), root)  # libnftables reads protocol names from it
        _copy_python(root)
        _copy_weft(root, version=version)
        for library in sorted(_libraries(root)):
            _copy_file(library, root)
        environment = {
            "PATH": "/bin",
            "PYTHONPATH": f"/{_LIBRARY}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LD_LIBRARY_PATH": _library_path(root),
        }
        write_image(archive, root, name=name, command=("weft", "--help"), environment=environment)


def _copy_python(root: Path) -> None:
    standard = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(standard, root / standard.relative_to("/"), ignore=shutil.ignore_patterns(*_NEEDLESS))
    _copy_file(_python(), root)


def _python() -> Path:
    return Path(sys.executable).resolve()


def _copy_weft(root: Path, *, version: str) -> None:
    library = root / _LIBRARY
    own = Path(weft.__file__).parent
    shutil.copytree(own, library / "weft")
    about = library / "weft" / "__init__.py"
    about.write_text(re.sub(r"(?m)^__version__ = .*$", f'__version__ = "{version}"', about.read_text()))
    for name in _needed("weft"):
        for file in metadata.distribution(name).files or ():
            source = Path(str(file.locate()))
            if ".." not in file.parts and source.is_file() and not source.name.endswith(".pth"):
                target = library / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
    for entry in metadata.distribution("weft").entry_points:
        if entry.group == "console_scripts" and entry.name in _PROGRAMS:
            program = root / "bin" / entry.name
            program.write_text(
                f"#!{_python()}\nimport sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())\n"
            )
            program.chmod(0o755)
    shim = root / SHIM.strip("/")
    shim.parent.mkdir(parents=True)
    shim.write_bytes(build_program("auto", python="/usr/bin/python3"))
    shim.chmod(0o755)


def _needed(name: str) -> set[str]:
    """A distribution and its runtime dependencies."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        each = waiting.pop()
        if each in found:
            continue
        try:
            requires = metadata.requires(each) or ()
        except metadata.PackageNotFoundError:
            continue  # not needed on this platform
        found.add(each)
        waiting += [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in requires if "extra ==" not in line]
    return found


def _libraries(root: Path) -> Iterator[Path]:
    """The shared libraries of the image's programs and modules, the loader, and libraries loaded by name."""
    binaries = [root / _python().relative_to("/"), *root.rglob("*.so"), *root.rglob("*.so.*")]
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True, timeout=30).stdout
    named = [Path(line.rpartition("=> ")[2]) for line in listed.splitlines() if line.strip().startswith(_NFTABLES)]
    found = set(named[:1])
    for words in _batches([*binaries, *found]):
        output = subprocess.run(["ldd", *words], capture_output=True, text=True, check=False, timeout=120).stdout
        found |= {Path(path) for path in re.findall(r"(/\S+) \(0x", output)}
    yield from (path for path in found if not path.is_relative_to(root))


def _batches(paths: list[Path], *, size: int = 200) -> Iterator[list[str]]:
    for start in range(0, len(paths), size):
        yield [str(path) for path in paths[start : start + size]]


def _library_path(root: Path) -> str:
    """The library path of the image, which has no loader cache."""
    folders = {path.parent for path in root.rglob("*.so*") if not path.is_relative_to(root / _LIBRARY)}
    return ":".join(sorted(f"/{folder.relative_to(root)}" for folder in folders if "python" not in str(folder)))


def _copy_file(path: Path, root: Path) -> None:
    target = root / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, target)
