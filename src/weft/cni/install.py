"""`weft install-cni`: installs the CNI plugin and its configuration where runtimes look for them.

Files are replaced atomically, so a runtime never executes half a program and never gets ETXTBSY (C-119). Running it
again changes nothing. Foreign files are neither replaced nor removed, unless `--force` is set; a list that chains us
with an incompatible plugin is refused in any case. Everything is checked before anything is written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from weft.cni.capabilities import CAPABILITIES
from weft.cni.chains import CONF_DIR, read_chain, read_chains
from weft.cni.files import place_file, place_link, remove_file
from weft.cni.versions import SpecVersion

PROGRAM = "weft-cni"
# Names by which existing configurations call the plugin: links to the program.
ALIASES = ("contivk8s", "kuryr-cni", "netcontiv")
NAMES = frozenset((PROGRAM, *ALIASES))

WEFT_CONF = "10-weft.conflist"
CONTIV_CONF = "1-contiv.conf"
BUILD_SECONDS = 120.0

# In every shim, C or Python: it identifies our programs, whoever installed them.
_MARK = b"weft-cni: the CNI plugin of weft"

_SOURCES = Path(__file__).parent
_COMPILE = """
import marshal, sys
code = compile(sys.stdin.buffer.read(), "weft-cni", "exec", optimize=2)
print(sys.modules["_frozen_importlib_external"].MAGIC_NUMBER)
sys.stdout.flush()
sys.stdout.buffer.write(marshal.dumps(code))
"""
# The program of `python -c` in the first line. Given the file itself, Python would first check whether it is a zip
# archive, and would then parse all of it.
_LOAD_SECOND_LINE = b'import sys;f=open(sys.argv[1],"rb");f.readline();exec(f.readline())'
_LOAD_REST = b"""import marshal; \
is_same_python = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER == %b; \
exec(marshal.loads(f.read()) if is_same_python else f.read()[%d:]) \
# Made by weft install-cni: what follows is main.py of weft.cni, compiled and then as it is.
"""
# In bytes; kernels before 5.1 truncate a longer interpreter line.
_MAX_FIRST_LINE = 127


class InstallError(Exception):
    """Why nothing was changed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Install or uninstall; 0 on success, 2 when it was refused."""
    parser = argparse.ArgumentParser(
        prog="weft install-cni",
        description="Install the CNI plugin and its configuration where runtimes look for them.",
    )
    parser.add_argument(
        "--bin-dir", type=Path, default=Path("/opt/cni/bin"), help="directory of CNI plugins; /opt/cni/bin"
    )
    parser.add_argument(
        "--conf-dir", type=Path, default=CONF_DIR, help=f"directory of network configurations; {CONF_DIR}"
    )
    parser.add_argument(
        "--shim", default="auto", help="c, python, the path of a built shim, or auto: c where it can be built; auto"
    )
    parser.add_argument("--python", default="/usr/bin/python3", help="interpreter of the Python shim; /usr/bin/python3")
    parser.add_argument(
        "--config", choices=("weft", "contiv", "none"), default="weft", help=f"{WEFT_CONF}, {CONTIV_CONF} or none; weft"
    )
    parser.add_argument("--network", default="weft", help=f"name of the network in {WEFT_CONF}; weft")
    parser.add_argument("--force", action="store_true", help="replace foreign files")
    parser.add_argument("--uninstall", action="store_true", help="remove our files, and only those")
    args = parser.parse_args(argv)
    try:
        if args.uninstall:
            report = uninstall(bin_dir=args.bin_dir, conf_dir=args.conf_dir)
        else:
            report = install(
                bin_dir=args.bin_dir,
                conf_dir=args.conf_dir,
                program=build_program(args.shim, python=args.python),
                config=_config(args.config, network=args.network),
                force=args.force,
            )
        for line in report:
            sys.stdout.write(f"{line}\n")
    except (InstallError, OSError) as error:
        sys.stderr.write(f"weft install-cni: {error}\n")
        return 2
    return 0


def install(
    *, bin_dir: Path, conf_dir: Path, program: bytes, config: tuple[str, bytes] | None, force: bool
) -> list[str]:
    """Install everything, the configuration last: it makes runtimes call the plugin. Returns what was done."""
    targets = [bin_dir / PROGRAM, *(bin_dir / alias for alias in ALIASES)]
    foreign = [path for path in targets if _is_there(path) and not _is_our_program(path)]
    conf = None if config is None else conf_dir / config[0]
    if conf is not None and conf.exists() and not _is_our_config(conf):
        foreign.append(conf)
    if foreign and not force:
        raise InstallError(f"not ours, so not replaced without --force: {', '.join(map(str, foreign))}")
    staying = [chain for chain in read_chains(conf_dir) if not (force and chain.file == conf)]
    if faults := [fault for chain in staying if (fault := chain.fault(NAMES))]:
        raise InstallError(f"{'; '.join(faults)}: take them out of the list")
    # From here on things are changed.
    bin_dir.mkdir(parents=True, exist_ok=True)
    kind = "Python" if program.startswith(b"#!") else "C"
    report = [f"{_report(targets[0], place_file(targets[0], program, mode=0o755))} ({kind})"]
    report += [_report(alias, place_link(alias, PROGRAM)) for alias in targets[1:]]
    if conf is not None and config is not None:
        conf_dir.mkdir(parents=True, exist_ok=True)
        # An administrator may have edited it.
        if conf.exists() and conf.read_bytes() != config[1] and not force:
            report.append(f"kept {conf}: it differs from what would be written; --force replaces it")
        else:
            report.append(_report(conf, place_file(conf, config[1], mode=0o644)))
    return report


def uninstall(*, bin_dir: Path, conf_dir: Path) -> list[str]:
    """Remove our files, the configuration first, so that no runtime calls a missing plugin. Returns what was done."""
    configs = [path for path in (conf_dir / WEFT_CONF, conf_dir / CONTIV_CONF) if path.exists()]
    programs = [path for path in (*(bin_dir / alias for alias in ALIASES), bin_dir / PROGRAM) if _is_there(path)]
    ours = [*filter(_is_our_config, configs), *filter(_is_our_program, programs)]
    for path in ours:
        remove_file(path)
    kept = [path for path in (*configs, *programs) if path not in ours]
    return [*(f"removed {path}" for path in ours), *(f"kept {path}: not ours" for path in kept)]


def build_program(shim: str, *, python: str) -> bytes:
    """The bytes of the requested shim: `auto`, `c`, `python`, or the path of a built one."""
    if shim == "python" or (shim == "auto" and not _compilers()):
        return _script(python)
    if shim in {"auto", "c"}:
        try:
            return _compile()
        except InstallError:
            if shim == "c":
                raise
            return _script(python)
    program = Path(shim).read_bytes()
    if _MARK not in program:
        raise InstallError(f"{shim} is not a shim of ours")
    return program


def _compilers() -> list[str]:
    # musl first: its programs start in half the time. glibc executes CPUID at every start, which traps to a hypervisor.
    return [path for name in ("musl-gcc", "cc", "gcc", "clang") if (path := shutil.which(name))]


def _compile() -> bytes:
    """The C shim, linked statically, so that it runs on any distribution; this needs a static C library."""
    fault = "there is no C compiler"
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        output = Path(folder, PROGRAM)
        for compiler in _compilers():
            command = [compiler, "-static", "-Os", "-s", "-o", str(output), str(_SOURCES / "shim.c")]
            try:
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_SECONDS)  # noqa: S603  no shell, our own file
                return output.read_bytes()
            except subprocess.CalledProcessError as error:
                fault = error.stderr.strip()[-500:]
            except (subprocess.TimeoutExpired, OSError) as error:
                fault = str(error)
    raise InstallError(f"the C shim cannot be built: {fault}")


def _script(python: str) -> bytes:
    """The Python shim, precompiled if possible: compiling takes as long as everything else that it does.

    Another version of Python, such as after an upgrade of the machine, finds the source behind it and compiles that.
    """
    if not Path(python).exists():
        raise InstallError(f"there is no {python} to run the Python shim, and no C shim: give --python or --shim")
    _, _, source = (_SOURCES / "main.py").read_bytes().partition(b"\n")
    plain = b"#!%s -IS\n" % python.encode()
    first = plain[:-1] + b"c%s\n" % _LOAD_SECOND_LINE
    if len(first) > _MAX_FIRST_LINE:
        return plain + source
    try:
        command = [python, "-IS", "-c", _COMPILE]
        done = subprocess.run(command, input=source, capture_output=True, check=True, timeout=BUILD_SECONDS)  # noqa: S603  no shell, our own file
    except (subprocess.SubprocessError, OSError):
        return plain + source
    kind, _, code = done.stdout.partition(b"\n")
    return first + _LOAD_REST % (kind, len(code)) + code + source


def _config(style: str, *, network: str) -> tuple[str, bytes] | None:
    """File name and content. Old runtimes read `cniVersion`, new ones select from `cniVersions`."""
    if style == "none":
        return None
    if style == "contiv":
        return CONTIV_CONF, _json({"cniVersion": SpecVersion.V0_3_1, "name": "contiv-net", "type": ALIASES[0]})
    plugin = {"type": PROGRAM, "capabilities": dict.fromkeys(CAPABILITIES, True)}
    versions = [SpecVersion.V0_4_0, SpecVersion.V1_0_0, SpecVersion.V1_1_0]
    return WEFT_CONF, _json(
        {"cniVersion": SpecVersion.V1_0_0, "cniVersions": versions, "name": network, "plugins": [plugin]}
    )


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _is_our_program(path: Path) -> bool:
    if path.is_symlink():
        return path.readlink() == Path(PROGRAM)
    return path.is_file() and _MARK in path.read_bytes()


def _is_our_config(path: Path) -> bool:
    """Whether it calls our plugin; an administrator may have edited the rest."""
    chain = read_chain(path)
    return chain is not None and chain.calls(NAMES)


def _report(path: Path, changed: bool) -> str:
    return f"{'installed' if changed else 'unchanged'} {path}"
