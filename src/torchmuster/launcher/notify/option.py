"""The option `--notify` of commands that start something, and the processes that deliver."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli import ending

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.proc import Child
    from torchmuster.launcher.notify.receivers import Receivers


def notifies(callback: Callable[..., int]) -> Callable[..., int]:
    """Give a command that starts a run, a sweep or a workflow the option `--notify`."""

    @click.option(
        "--notify",
        metavar="NAME|@FILE",
        help="Whom to tell when it fails, hangs, waits for long, or ends: docs/notify.md.",
    )
    @functools.wraps(callback)
    def notifying(*words: Any, notify: str | None, **given: Any) -> int:
        receivers = None
        if notify is not None:
            from torchmuster.launcher.notify.receivers import find

            receivers = find(notify, os.getcwd(), os.environ)
        begun = _Notifying(receivers, is_detached=bool(given.get("detach")))
        ending.followed, ending.companion = None, begun
        try:
            return callback(*words, **given)
        finally:
            ending.companion = None
            begun.end()

    return notifying


class _Notifying:
    """The process that delivers, from when the command's record exists."""

    def __init__(self, receivers: "Receivers | None", *, is_detached: bool) -> None:
        self._receivers, self._is_detached = receivers, is_detached
        self._run_dir: RunDir | None = None
        self._child: Child | None = None

    def prepare(self, run_dir: "RunDir", before: "RunDir | None") -> None:
        """Write down who gets notices, as asked or as of the run that is continued."""
        from torchmuster.core.files import atomic
        from torchmuster.core.plainfile import open_own

        data = self._receivers.as_text().encode() if self._receivers is not None else None
        if data is None and before is not None:
            with contextlib.suppress(OSError), open_own(before.notify) as file:
                data = file.read()
        if data is not None:
            atomic.replace_file(run_dir.notify, data, mode=0o600)

    def start(self, run_dir: "RunDir") -> None:
        """Start the process that delivers, and say so."""
        if os.path.exists(run_dir.notify):
            self._run_dir = run_dir
            click.echo(f"muster: notify: {_who_sends(run_dir)}", err=True)
            self._start()

    def _start(self) -> None:
        from torchmuster.core import proc
        from torchmuster.launcher.notify.watcher import CLIENT, start_quietly

        assert self._run_dir is not None
        client = () if self._is_detached else (str(os.getpid()),)
        words = proc.node_program("notify", self._run_dir.path, CLIENT, *client)
        self._child = start_quietly(words)

    def end(self) -> None:
        """Start the process again if somebody has killed it: the end is to be told."""
        if self._child is not None and self._child.poll() not in (None, 0):
            self._start()


def _who_sends(run_dir: "RunDir") -> str:
    """Return who delivers to whom, as a sentence."""
    from torchmuster.core import plugs
    from torchmuster.core.files import atomic
    from torchmuster.core.model.text import few_of
    from torchmuster.core.plainfile import open_own
    from torchmuster.launcher.notify.receivers import parse

    with open_own(run_dir.notify) as file:
        receivers = parse(file.read().decode(), run_dir.notify)
    to = few_of([one.label for one in receivers.all], 8)
    job = atomic.read_json(run_dir.job)
    if not isinstance(job, dict):
        return f"this machine sends to {to}"
    if job.get("engine") in plugs.table("schedulers"):
        return f"the job sends to {to}; what it can't reach, this command tells while it runs"
    return f"this machine sends to {to} while this command runs"
