"""The option `--notify` of commands that start something, and the processes that deliver."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli import ending
from torchmuster.errors import MusterError

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.launcher.notify.receivers import Receivers
    from torchmuster.launcher.notify.watcher import Started


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
        self._started: Started | None = None

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
        """Start the process that delivers, and say so; the run goes on without it, too."""
        if not os.path.exists(run_dir.notify):
            return
        try:
            self._run_dir = run_dir
            said = _who_sends(run_dir, is_detached=self._is_detached)
            self._start()
        except (MusterError, OSError) as error:
            said = f"nobody sends: {error}"
        click.echo(f"muster: notify: {said}", err=True)

    def _start(self) -> None:
        from torchmuster.launcher.notify import watcher

        assert self._run_dir is not None
        stays = not (watcher.is_far(self._run_dir) or _ends_with_us())
        self._started = watcher.start(self._run_dir, watcher.CLIENT, stays=stays)

    def end(self) -> None:
        """Start the process again if somebody has killed it; wait for it where it ends with us."""
        if self._started is None:
            return
        if self._started.child.poll() not in (None, 0):
            self._start()
        self._started.last_call(waits=_ends_with_us())


def _ends_with_us() -> bool:
    """Say whether nothing of ours outlives us: in a job, or as a container's own process."""
    from torchmuster.launcher.engines.schedulers import own_jobs

    return bool(own_jobs(os.environ)) or 1 in (os.getpid(), os.getppid())


def _who_sends(run_dir: "RunDir", *, is_detached: bool) -> str:
    """Return who delivers to whom, as a sentence."""
    from torchmuster.core.model.text import few_of
    from torchmuster.core.plainfile import open_own
    from torchmuster.launcher.notify.receivers import parse
    from torchmuster.launcher.notify.watcher import is_far

    with open_own(run_dir.notify) as file:
        receivers = parse(file.read().decode(), run_dir.notify)
    to = few_of([one.label for one in receivers.all], 8)
    if _job_sends(run_dir):
        less = "" if is_detached else "; what it can't reach, this command tells while it runs"
        return f"the job sends to {to}{less}"
    if is_far(run_dir) and is_detached:
        return f"nobody sends to {to}: nothing stays here, and no process there sends"
    return f"this machine sends to {to}" + (" while this command runs" if is_far(run_dir) else "")


def _job_sends(run_dir: "RunDir") -> bool:
    """Say whether a process next to the head sends, too: in batch jobs, not in pods."""
    from torchmuster.launcher.engines.base import object_dialect
    from torchmuster.launcher.jobs.jobs import read_job

    job = read_job(run_dir)
    return job is not None and object_dialect(job[0]) is None
