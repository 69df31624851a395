"""`weft install-cni`: put the CNI plugin and its configuration where runtimes look for them.

Every file appears whole under its name or not at all (temporary name, fsync, rename), so a runtime never executes half
a program and never meets "text file busy" (C-119). Running it again changes nothing. What others put there is neither
replaced nor removed, unless `--force` says so; a list that chains us with what cannot work beside us is refused in any
case. Nothing is written before all of it is known to be allowed.
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

# Found in every shim, C or Python: so a process with no memory knows what is ours.
_MARK = b"weft-cni: the CNI plugin of weft"

_SOURCES = Path(__file__).parent
_COMPILE = """
import marshal, sys
code = compile(sys.stdin.buffer.read(), "weft-cni", "exec", optimize=2)
print(sys.modules["_frozen_importlib_external"].MAGIC_NUMBER)
sys.stdout.flush()
sys.stdout.buffer.write(marshal.dumps(code))
"""
# What Python runs, from the first line. Given the file itself, it would look whether that is an archive, and parse
# all of it.
_LOAD_SECOND_LINE = b'import sys;f=open(sys.argv[1],"rb");f.readline();exec(f.readline())'
_LOAD_REST = b"""import marshal; \
is_that_kind = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER == %b; \
exec(marshal.loads(f.read()) if is_that_kind else f.read()[%d:]) \
# Made by weft install-cni: what follows is main.py of weft.cni, compiled and then as it is.
"""
# In bytes; a kernel before 5.1 cuts it there.
_LONGEST_FIRST_LINE = 127


class InstallError(Exception):
    """Nothing was changed, and why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Install or uninstall; 0 when all is as asked, 2 when it was refused."""
    parser = argparse.ArgumentParser(
        prog="weft install-cni", description="Put the CNI plugin and its configuration where runtimes look for them."
    )
    parser.add_argument("--bin-dir", type=Path, default=Path("/opt/cni/bin"), help="where plugins are; /opt/cni/bin")
    parser.add_argument("--conf-dir", type=Path, default=CONF_DIR, help=f"where networks are; {CONF_DIR}")
    parser.add_argument(
        "--shim", default="auto", help="c, python, a program built before, or auto: c where it can be built; auto"
    )
    parser.add_argument("--python", default="/usr/bin/python3", help="what runs the Python shim; /usr/bin/python3")
    parser.add_argument(
        "--config", choices=("weft", "contiv", "none"), default="weft", help=f"{WEFT_CONF}, {CONTIV_CONF} or none; weft"
    )
    parser.add_argument("--network", default="weft", help=f"name of the network in {WEFT_CONF}; weft")
    parser.add_argument("--force", action="store_true", help="replace what others put there")
    parser.add_argument("--uninstall", action="store_true", help="remove what is ours, and only that")
    args = parser.parse_args(argv)
    try:
        if args.uninstall:
            told = uninstall(bin_dir=args.bin_dir, conf_dir=args.conf_dir)
        else:
            told = install(
                bin_dir=args.bin_dir,
                conf_dir=args.conf_dir,
                program=build_program(args.shim, python=args.python),
                config=_config(args.config, network=args.network),
                force=args.force,
            )
        for line in told:
            sys.stdout.write(f"{line}\n")
    except (InstallError, OSError) as error:
        sys.stderr.write(f"weft install-cni: {error}\n")
        return 2
    return 0


def install(
    *, bin_dir: Path, conf_dir: Path, program: bytes, config: tuple[str, bytes] | None, force: bool
) -> list[str]:
    """Put everything in its place, the configuration last: it is what makes a runtime call. Tells what was done."""
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
    bin_dir.mkdir(parents=True, exist_ok=True)
    kind = "Python" if program.startswith(b"#!") else "C"
    told = [f"{_tell(targets[0], place_file(targets[0], program, mode=0o755))} ({kind})"]
    told += [_tell(alias, place_link(alias, PROGRAM)) for alias in targets[1:]]
    if conf is not None and config is not None:
        conf_dir.mkdir(parents=True, exist_ok=True)
        if conf.exists() and conf.read_bytes() != config[1] and not force:
            told.append(f"kept {conf}: it differs from what would be written; --force replaces it")
        else:
            told.append(_tell(conf, place_file(conf, config[1], mode=0o644)))
    return told


def uninstall(*, bin_dir: Path, conf_dir: Path) -> list[str]:
    """Remove what is ours, the configuration first, so that no runtime calls what is gone. Tells what was done."""
    configs = [path for path in (conf_dir / WEFT_CONF, conf_dir / CONTIV_CONF) if path.exists()]
    programs = [path for path in (*(bin_dir / alias for alias in ALIASES), bin_dir / PROGRAM) if _is_there(path)]
    ours = [*filter(_is_our_config, configs), *filter(_is_our_program, programs)]
    for path in ours:
        remove_file(path)
    kept = [path for path in (*configs, *programs) if path not in ours]
    return [*(f"removed {path}" for path in ours), *(f"kept {path}: not ours" for path in kept)]


def build_program(shim: str, *, python: str) -> bytes:
    """The bytes of the shim asked for: `auto`, `c`, `python`, or the path of one that was built before."""
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
    """The best first: what is built with musl starts in half the time, because glibc asks the processor what it can do,
    and under a hypervisor each such question takes long."""
    return [path for name in ("musl-gcc", "cc", "gcc", "clang") if (path := shutil.which(name))]


def _compile() -> bytes:
    """Built statically, so that it runs on any machine of the kind; without a static C library it cannot be."""
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
    """The Python shim, compiled where it can be: that takes as long as all the rest of it.

    An interpreter of another kind, such as the next version of the machine's, finds the source and compiles that.
    """
    if not Path(python).exists():
        raise InstallError(f"there is no {python} to run the Python shim, and no C shim: give --python or --shim")
    _, _, source = (_SOURCES / "main.py").read_bytes().partition(b"\n")
    plain = b"#!%s -IS\n" % python.encode()
    first = plain[:-1] + b"c%s\n" % _LOAD_SECOND_LINE
    if len(first) > _LONGEST_FIRST_LINE:
        return plain + source
    try:
        command = [python, "-IS", "-c", _COMPILE]
        done = subprocess.run(command, input=source, capture_output=True, check=True, timeout=BUILD_SECONDS)  # noqa: S603  no shell, our own file
    except (subprocess.SubprocessError, OSError):
        return plain + source
    kind, _, code = done.stdout.partition(b"\n")
    return first + _LOAD_REST % (kind, len(code)) + code + source


def _config(style: str, *, network: str) -> tuple[str, bytes] | None:
    """File name and content. Old runtimes read `cniVersion`, new ones take the best of `cniVersions`."""
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
    """Whether it calls our plugin, edited by hand or not."""
    chain = read_chain(path)
    return chain is not None and chain.names(NAMES)


def _tell(path: Path, changed: bool) -> str:
    return f"{'installed' if changed else 'unchanged'} {path}"
