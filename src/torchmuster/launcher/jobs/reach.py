"""Call all hosts of an ssh site at once: which ones answer, with what processor and Python."""

import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torchmuster.core import proc
from torchmuster.errors import MusterError
from torchmuster.launcher.engines.ssh_command import (
    CONNECT_LIMIT_S,
    SshHost,
    session_argv,
    ssh_command,
)

Ask = Callable[[Sequence[str]], proc.CommandOutput]
_AT_ONCE = 32
_MARK = "torchmuster-reached"
# The host's shell may print anything before the mark.
_COMMAND = f"echo {_MARK}; uname -m; python3 -V"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Outcome of a call; `words` describe the host, or, if not `is_here`, the problem."""

    host: str
    is_here: bool
    words: str


def ask_host(argv: Sequence[str]) -> proc.CommandOutput:
    """Run ssh for at most 10 s.

    Raises:
        MusterError: ssh can't be executed.
    """
    return proc.ask(argv, b"", CONNECT_LIMIT_S)


def reach_hosts(hosts: Sequence[SshHost], asking: Ask = ask_host) -> list[Reached]:
    """Return for each host whether it answers within 10 s; nothing is started or left there."""
    if not hosts:
        return []
    ssh = ssh_command(os.environ)
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return list(pool.map(lambda host: _reach(ssh, host, asking), hosts))


def _reach(ssh: Sequence[str], host: SshHost, asking: Ask) -> Reached:
    try:
        said = asking(session_argv(ssh, host, _COMMAND))
    except (MusterError, ValueError) as error:
        return Reached(host=host.name, is_here=False, words=str(error))
    lines = said.stdout.decode(errors="replace").splitlines()
    errors = [line for line in said.stderr.decode(errors="replace").splitlines() if line.strip()]
    if said.status is None:
        words = f"it did not answer within {CONNECT_LIMIT_S:g} s"
        return Reached(host=host.name, is_here=False, words=words)
    if _MARK not in lines:
        words = errors[-1].strip()[:200] if errors else f"ssh ended with {said.status}"
        return Reached(host=host.name, is_here=False, words=words)
    after = lines[lines.index(_MARK) + 1 :]
    machine = after[0].strip() if after else "processor not told"
    python = after[1].strip() if len(after) > 1 else "no python3 on PATH"
    other = f", here {platform.machine()}" if machine != platform.machine() else ""
    return Reached(host=host.name, is_here=True, words=f"{machine}{other}, {python}")
