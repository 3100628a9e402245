"""Find the schedulers on this machine: their commands, versions, partitions and queues.

Each command has a time limit; one that hangs or fails is a finding, not an error.
"""

import os
import pwd
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.core import proc
from torchmuster.errors import MusterError
from torchmuster.launcher.engines.base import AccountQuestion, Queue, QueueQuestion
from torchmuster.launcher.engines.registry import load_dialect, schedulers
from torchmuster.launcher.engines.schedulers import CLIENTS

TIMEOUT_S = 5.0
Ask = Callable[[Sequence[str]], proc.CommandOutput]
Which = Callable[[str], str | None]
_SSH = "ssh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A command of a scheduler.

    Attributes:
        path: Where it is; None if it is not on PATH.
        version: The version that it prints; None if unknown.
        problem: Why there is no version.
    """

    name: str
    path: str | None
    version: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueList:
    """The queues that were found; `problem` says why some may be missing."""

    queues: tuple[Queue, ...] = ()
    problem: str | None = None


def ask(argv: Sequence[str]) -> proc.CommandOutput:
    """Run a scheduler's command for at most `TIMEOUT_S`.

    Raises:
        MusterError: The command can't be executed.
    """
    return proc.ask(argv, b"", TIMEOUT_S)


def client_of(kind: str) -> str | None:
    """Return the command whose presence indicates this kind of engine; None if there is none."""
    return _SSH if kind == _SSH else schedulers()[kind].client if kind in schedulers() else None


def tools_of(kind: str) -> tuple[str, ...]:
    """Return all commands that a run on this kind of engine needs on this machine."""
    entry = schedulers().get(kind)  # none for `local`, which needs no command
    return (_SSH,) if kind == _SSH else tuple(entry.tools) if entry is not None else ()


def find_tool(name: str, which: Which, asking: Ask = ask) -> Tool:
    """Look up a command; ask its version if it has a known option for it."""
    path = which(name)
    if path is None or name not in (*CLIENTS, _SSH):
        return Tool(name=name, path=path)
    text, problem = _answer((name, "-V" if name == _SSH else "--version"), asking, both=True)
    version = parse_version(text)
    if version is None and problem is None:
        problem = "it printed no version"
    return Tool(name=name, path=path, version=version, problem=None if version else problem)


def parse_version(text: str) -> str | None:
    """Parse the version from the output of `sbatch --version`, `qsub --version` or `ssh -V`."""
    match = re.search(r"OpenSSH_[\w.]+|\d+(?:\.\w+)+", text)
    return match[0] if match else None


def list_queues(kind: str, asking: Ask = ask) -> QueueList:
    """Return the partitions or queues of a scheduler; none for engines of other kinds."""
    question: QueueQuestion | None = _asked_by(kind, "queues")
    if question is None:
        return QueueList()
    text, problem = _answer(question.argv, asking)
    queues = question.parse(text)
    if queues and question.default_argv is not None:
        queues = question.mark_default(queues, _answer(question.default_argv, asking)[0])
    if not queues and problem is None:
        problem = f"`{' '.join(question.argv)}` listed none"
    return QueueList(queues=queues, problem=problem)


def lists_accounts(kind: str) -> bool:
    """Return whether this scheduler can list the accounts of a user."""
    return _asked_by(kind, "accounts") is not None


def list_accounts(kind: str, which: Which, asking: Ask = ask) -> tuple[tuple[str, ...], str | None]:
    """Return the accounts that this user may name, and why there are none, if known."""
    question: AccountQuestion = _asked_by(kind, "accounts")
    argv = question.argv_for(pwd.getpwuid(os.getuid()).pw_name)
    if which(argv[0]) is None:
        return (), f"no {argv[0]} on PATH"
    text, problem = _answer(argv, asking)
    return question.parse(text), problem


def _asked_by(kind: str, what: str) -> Any:
    """Return the dialect's question for `what`; None if it has none, or is no scheduler's."""
    return None if kind in ("local", _SSH) else getattr(load_dialect(kind), what, None)


def _answer(argv: Sequence[str], asking: Ask, *, both: bool = False) -> tuple[str, str | None]:
    """Return what a command printed, and its problem, if any."""
    try:
        said = asking(argv)
    except MusterError as error:
        return "", error.why or error.what
    out = said.stdout.decode(errors="replace")
    err = said.stderr.decode(errors="replace")
    text = f"{out}\n{err}" if both else out
    if said.status is None:
        return text, f"`{' '.join(argv)}` did not answer within {TIMEOUT_S:g} s"
    if said.status:
        last = (err.strip() or out.strip() or f"exit code {said.status}").splitlines()[-1]
        return text, f"`{' '.join(argv)}`: {last[:200]}"
    return text, None
