"""ssh's command lines, and the meaning of its answers: pure functions.

The command for the host has no quote, backslash, newline or exclamation mark within its single
quotes: sh, bash, zsh, csh and fish then all parse it alike. Everything else travels on standard
input.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

CONNECT_LIMIT_S = 10.0
_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=8",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
)
_PYTHONS = ("python3.14", "python3.13", "python3.12", "python3.11", "python3", "python")
_PLAIN = re.compile(r"[A-Za-z0-9_./+@%=-]+")
_MAX_WORDS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHost:
    """A host to reach.

    Attributes:
        name: Its name in ssh's configuration.
        slots: Number of workers; None if not given.
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None


def ssh_command(environment: Mapping[str, str]) -> list[str]:
    """Return the ssh command: $MUSTER_SSH, split like a shell does, else `ssh`."""
    return shlex.split(environment.get("MUSTER_SSH", "")) or ["ssh"]


def session_argv(ssh: Sequence[str], host: SshHost, command: str) -> list[str]:
    """Return the command that opens a session; the user's configuration provides the rest."""
    argv = [*ssh, *(word for option in _OPTIONS for word in ("-o", option)), "-T"]
    if host.user is not None:
        argv += ["-l", host.user]
    if host.port is not None:
        argv += ["-p", str(host.port)]
    if host.name.startswith("-"):
        raise ValueError(f"`{host.name}` is not a valid host")
    return [*argv, host.name, command]


def marker_of(sha: str) -> str:
    """Return the line that ends the output of the host's shell itself."""
    return f"torchmuster-{sha[:16]}"


def remote_command(marker: str, loader_bytes: int, pythons: Sequence[str]) -> str:
    """Return the host's command, for its login shell: find a Python from 3.11 on, read the loader.

    `pythons` are tried first, except those with special characters.
    """
    first = [python for python in pythons if _PLAIN.fullmatch(python)]
    words = " ".join(dict.fromkeys([*first, *_PYTHONS]))
    check = '"import sys;sys.exit(sys.version_info<(3,11))"'
    load = f'"import os;r=lambda n:(b:=os.read(0,n))and b+r(n-len(b));exec(r({loader_bytes}))"'
    script = (
        f"for p in {words}; do"
        f" if $p -I -S -c {check} </dev/null >/dev/null 2>&1; then"
        f" echo; echo {marker}; exec $p -I -S -c {load}; fi; done;"
        f" echo; echo {marker}; echo no-python; python3 -V; exit 97"
    )
    if any(sign in script for sign in "'\\!\n`"):
        raise ValueError("the command can't be quoted for every shell")
    return f"exec /bin/sh -c '{script}'"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProblem:
    """Why a host can't be used.

    Attributes:
        words: The evidence, in ssh's own words where possible.
        fix: One command or edit.
    """

    host: str
    words: str
    fix: str

    def line(self) -> str:
        """Return host and evidence as one line."""
        return f"{self.host}: {self.words}"


_HINTS = (
    (r"host key verification failed|no \S+ host key is known", "`ssh {0}` once, to accept its key"),
    (r"remote host identification has changed", "if the change is right: ssh-keygen -R {0}"),
    (r"permission denied|too many authentication failures", "ssh-copy-id {0}, or ssh-add your key"),
    (r"could not resolve hostname", "is the name right? look in ~/.ssh/config and DNS"),
    (r"connection refused", "does sshd run there, on this port?"),
    (r"timed out|no route to host|network is unreachable", "is the host up? try `ssh {0} true`"),
    (r"bad configuration option|bad owner or permissions", "mend your ~/.ssh/config"),
    (r"password|expired", "log in with `ssh {0}` and do what it asks"),
)


def hint_for(host: str, words: str) -> str:
    """Return a remedy for an error message of ssh."""
    for pattern, hint in _HINTS:
        if re.search(pattern, words, re.IGNORECASE):
            return hint.format(host)
    return f"try `ssh -o BatchMode=yes {host} true`: it must print nothing"


def problem_of(
    host: str, stderr: str, otherwise: str, hint_of: Callable[[str, str], str] = hint_for
) -> HostProblem:
    """Return the problem from ssh's standard error; `otherwise` is used if that is empty."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if any(re.search(p, line, re.IGNORECASE) for p, _ in _HINTS)]
    words = " / ".join((telling or lines)[-2:])[-_MAX_WORDS:] or otherwise
    return HostProblem(host=host, words=words, fix=hint_of(host, f"{words} {otherwise}"))


def no_python(host: str, said: str) -> HostProblem:
    """Return the problem of a host whose Python is too old or missing."""
    found = said.strip().splitlines()[-1:] or ["python3 is not on PATH"]
    return HostProblem(
        host=host,
        words=f"there is no Python 3.11 or later ({found[0][:80]})",
        fix="MUSTER_SSH_PYTHON=/path/to/python3 muster run ...",
    )
