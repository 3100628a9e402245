"""How agents come to the other hosts of a job: the first command of the site's list that is there.

PBS's own commands are often not on the PATH of a job's script, so they are looked for where PBS is installed, too.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.engines.base import Dialect, EngineError, NodeStart
from torchmuster.errors import UsageError
from torchmuster.model.job import StartWay

_WRAPPER_SAYS = "no non-PBS mpiexec in PBS_O_PATH"
_CONF = "/etc/pbs.conf"
_ROOTS = ("/opt/pbs", "/usr/local/pbs")  # Source: OpenPBS and PBS Professional, default PBS_EXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to the other hosts.

    Attributes:
        kind: None for a dialect that has one way only.
        program: The command by its full path where it isn't on PATH.
        sentence: What to say of the choice; None where it is the usual one.
    """

    kind: StartWay | None = None
    program: str | None = None
    sentence: str | None = None

    def argv(self, dialect: Dialect, start: NodeStart) -> list[str]:
        """Return the dialect's command with this program."""
        argv = dialect.node_argv(start)
        return [self.program, *argv[1:]] if self.program is not None else argv


def parse_ways(text: str | None) -> tuple[StartWay, ...]:
    """Return ways from words with commas between them; UsageError for a word that is none."""
    found: list[StartWay] = []
    for word in filter(None, (text or "").split(",")):
        try:
            found.append(StartWay(word))
        except ValueError:
            known = ", ".join(way.value for way in StartWay)
            raise UsageError(f"`{word}` is not a launcher", fix=f"one of {known}") from None
    return tuple(found)


def choose_way(
    dialect: Dialect,
    wanted: Sequence[StartWay],
    environment: Mapping[str, str],
    which: Callable[[str], str | None] = shutil.which,
    read: Callable[[str], str] | None = None,
) -> Way:
    """Return the first of the wanted ways that is there, else of the dialect's own.

    Raises:
        EngineError: None is.
    """
    own: tuple[StartWay, ...] = getattr(dialect, "start_ways", ())
    if not own and not wanted:
        return Way()
    read = read or _read
    folders = _folders(environment, read)
    wrapper: str | None = None
    for way in wanted or own:
        path = which(way.value)
        if path is not None and way is StartWay.MPIEXEC and _is_wrapper(path, folders, read):
            wrapper = path
        elif path is not None:
            return Way(kind=way, sentence=_sentence(way, way.value, wanted or own))
        paths = [os.path.join(folder, way.value) for folder in folders]
        # ssh and srun belong to no PBS, and PBS's mpiexec is no way.
        others = (StartWay.SSH, StartWay.MPIEXEC)
        if way in own and way not in others and (path := next(filter(which, paths), None)):
            return Way(kind=way, program=path, sentence=_sentence(way, path, wanted or own))
    raise _no_way(wanted or own, folders, wrapper)


def _no_way(ways: Sequence[StartWay], folders: Sequence[str], wrapper: str | None) -> EngineError:
    why = f"{wrapper} is OpenPBS's own, which only calls another MPI's" if wrapper else ""
    missing = [way.value for way in ways if not (wrapper and way is StartWay.MPIEXEC)]
    none = f"none of these exists: {', '.join(missing)}" if missing else ""
    return EngineError(
        "there is no way to start agents on the job's other hosts",
        where=f"PATH, {', '.join(folders)}" if folders else "PATH",
        why="; ".join(filter(None, (why, none))),
        fix="set `start_with` in muster.toml, or load PBS's module in `setup`",
    )


def _is_wrapper(path: str, folders: Sequence[str], read: Callable[[str], str]) -> bool:
    """Say whether an mpiexec is OpenPBS's own, which only calls another MPI's that it looks for on PBS_O_PATH."""
    if os.path.dirname(os.path.realpath(path)) in folders:
        return True
    try:
        return _WRAPPER_SAYS in read(path)
    except (OSError, ValueError):
        return False  # a program, or nothing that we may read


def _sentence(way: StartWay, program: str, ways: Sequence[StartWay]) -> str | None:
    if way is StartWay.PBSDSH and program == way.value:
        return None
    before = [other.value for other in ways[: ways.index(way)]]
    why = f": there is no {' and no '.join(before)} here that works" if before else ""
    return f"agents of the other hosts are started by {program}{why}"


def _folders(environment: Mapping[str, str], read: Callable[[str], str]) -> list[str]:
    """Return where PBS may have its commands."""
    roots = [environment["PBS_EXEC"]] if environment.get("PBS_EXEC") else []
    with contextlib.suppress(OSError):  # no PBS, or one without the file
        roots += re.findall(r"^\s*PBS_EXEC=(\S+)", read(_CONF), re.MULTILINE)
    return [os.path.join(root, "bin") for root in dict.fromkeys([*roots, *_ROOTS])]


def _read(path: str) -> str:
    with open(path) as file:
        return file.read(1 << 16)
