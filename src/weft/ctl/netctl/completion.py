"""Completion scripts for bash, zsh and fish, written from the table of commands.

They are static: pressing TAB starts no Python and asks no netmaster. Each script finds the words of the line that are
neither flags nor values of the flags before the command, and offers what may come next at that place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from weft.ctl.netctl.cli_spec import Command, Flag, Noun
from weft.ctl.netctl.commands import COMMANDS, GLOBAL_FLAGS, NOUNS

_HELP = Flag(("--help", "-h"), "show help", form="switch")
_VERSION = Flag(("--version", "-v"), "show the version of netctl", form="switch")

_BASH = r"""# bash completion of netctl; load it with: source <(netctl completion bash)
_netctl() {
    local current previous line="" skip="" word offered=""
    local -a typed
    # The words are cut at blanks only: bash itself would also cut at the colons of a URL.
    read -ra typed <<<"${COMP_LINE:0:COMP_POINT}"
    [[ ${COMP_LINE:0:COMP_POINT} == *[[:space:]] ]] && typed+=("")
    current="${typed[-1]}"
    unset "typed[-1]"
    previous="${typed[-1]}"
    if [[ $current == --*=* ]]; then
        previous="${current%%=*}"
        current="${current#*=}"
    fi
    for word in "${typed[@]:1}"; do
        [[ -n $skip ]] && skip="" && continue
        case "$word" in
            @SKIP@) skip=yes ;;
            -*) ;;
            *) line+="${line:+ }$word" ;;
        esac
    done
    case "$line" in
@PLACES@
    esac
    mapfile -t COMPREPLY < <(compgen -W "$offered" -- "$current")
}
complete -F _netctl netctl
"""

_ZSH = r"""#compdef netctl
# zsh completion of netctl; load it with: source <(netctl completion zsh)
_netctl() {
    local current="${words[CURRENT]}" previous="${words[CURRENT-1]}" line="" skip="" word
    local -a offered
    if [[ $current == --*=* ]]; then
        previous="${current%%=*}"
        compset -P '*='
    fi
    for word in "${(@)words[2,CURRENT-1]}"; do
        [[ -n $skip ]] && skip="" && continue
        case "$word" in
            @SKIP@) skip=yes ;;
            -*) ;;
            *) line+="${line:+ }$word" ;;
        esac
    done
    case "$line" in
@PLACES@
    esac
    _describe netctl offered
}
if [[ $funcstack[1] == _netctl ]]; then
    _netctl "$@"
else
    compdef _netctl netctl
fi
"""

_FISH = r"""# fish completion of netctl; load it with: netctl completion fish | source
function __netctl_at
    set -l line
    set -l skip no
    for word in (commandline -opc)[2..-1]
        if test $skip = yes
            set skip no
        else if contains -- $word @SKIP@
            set skip yes
        else if not string match -q -- '-*' $word
            set -a line $word
        end
    end
    string match -qr -- "^($argv)\$" "$line"
end
complete -c netctl -f
@PLACES@
"""


class _Place(NamedTuple):
    """A point in the line: how the words before it may be spelled, and what may come there."""

    lines: tuple[str, ...]
    words: tuple[tuple[str, str], ...]
    flags: tuple[Flag, ...]
    # The command is complete, and words of the user's own may stand in the line too.
    leaf: bool = False
    files: bool = False


def completion_script(shell: str) -> str:
    """The script for one of the shells `bash`, `zsh` and `fish`."""
    skipped = [flag.names[0] for flag in GLOBAL_FLAGS if flag.takes_value]
    if shell == "fish":
        places = [line for place in _places() for line in _fish_lines(place)]
        return _fill(_FISH, skip=" ".join(skipped), places=places)
    if shell == "zsh":
        return _fill(_ZSH, skip="|".join(skipped), places=[_zsh_case(place) for place in _places()])
    return _fill(_BASH, skip="|".join(skipped), places=[_bash_case(place) for place in _places()])


def _fill(template: str, *, skip: str, places: list[str]) -> str:
    return template.replace("@SKIP@", skip).replace("@PLACES@", "\n".join(places))


def _places() -> Iterator[_Place]:
    yield _Place(("",), _words((*NOUNS, *COMMANDS)), (*GLOBAL_FLAGS, _HELP, _VERSION))
    for noun in NOUNS:
        yield _Place(noun.names, _words(noun.commands), (_HELP,))
        for command in noun.commands:
            yield _leaf(command, tuple(f"{first} {second}" for first in noun.names for second in command.names))
    for command in COMMANDS:
        yield _leaf(command, command.names)


def _words(entries: tuple[Noun | Command, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((entry.names[0], entry.text) for entry in entries)


def _leaf(command: Command, lines: tuple[str, ...]) -> _Place:
    return _Place(
        lines,
        tuple((value, argument.text) for argument in command.arguments for value in argument.values),
        (*command.flags, *GLOBAL_FLAGS, _HELP),
        leaf=True,
        files=any(argument.member == "file" for argument in command.arguments),
    )


def _patterns(place: _Place) -> str:
    """The place's lines as patterns of a `case`, the same in bash and zsh."""
    return "|".join(f'"{line}"|"{line} "*' if place.leaf else f'"{line}"' for line in place.lines)


def _bash_case(place: _Place) -> str:
    lines = [f"        {_patterns(place)})", '            case "$previous" in']
    for flag in filter(lambda flag: flag.takes_value, place.flags):
        then = f'offered="{" ".join(flag.values)}"' if flag.values else "return"
        lines.append(
            f"                {'|'.join(flag.names)}) {'compopt -o default; return' if _is_file(flag) else then} ;;"
        )
    offered = [word for word, _ in place.words] + [flag.names[0] for flag in place.flags]
    lines.append(f'                *) offered="{" ".join(offered)}" ;;')
    lines.append("            esac")
    if place.files:
        lines.append("            [[ $current != -* ]] && compopt -o default && return")
    return "\n".join((*lines, "            ;;"))


def _zsh_case(place: _Place) -> str:
    lines = [f"        {_patterns(place)})", '            case "$previous" in']
    for flag in filter(lambda flag: flag.takes_value, place.flags):
        then = f"offered=({' '.join(flag.values)})" if flag.values else "return"
        lines.append(f"                {'|'.join(flag.names)}) {'_files; return' if _is_file(flag) else then} ;;")
    offered = [*place.words, *((flag.names[0], flag.text) for flag in place.flags)]
    lines.append("                *) offered=(")
    lines += [f"                    {_zsh_quoted(f'{word}:{text}')}" for word, text in offered]
    lines += ["                ) ;;", "            esac"]
    if place.files:
        lines.append("            [[ $current != -* ]] && _files && return")
    return "\n".join((*lines, "            ;;"))


def _fish_lines(place: _Place) -> Iterator[str]:
    pattern = f"({'|'.join(place.lines)})( .*)?" if place.leaf else "|".join(place.lines)
    start = f"complete -c netctl -n {_fish_quoted(f'__netctl_at {_fish_quoted(pattern)}')}"
    if place.files:
        yield f"{start} -F"
    for word, text in place.words:
        yield f"{start} -a {word} -d {_fish_quoted(text)}"
    for flag in place.flags:
        value = f" -x -a {_fish_quoted(' '.join(flag.values))}" if flag.values else " -x" if flag.takes_value else ""
        names = " ".join(_fish_name(name) for name in flag.names)
        yield f"{start} {names}{' -r -F' if _is_file(flag) else value} -d {_fish_quoted(flag.text)}"


def _is_file(flag: Flag) -> bool:
    return flag.placeholder == "FILE"


def _fish_name(name: str) -> str:
    if name.startswith("--"):
        return f"-l {name[2:]}"
    return f"-s {name[1:]}" if len(name) == 2 else f"-o {name[1:]}"


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
