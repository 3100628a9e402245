"""`torchmuster.session`: `muster session` from Python; calls start with a fork on held nodes."""

import array
import contextlib
import itertools
import os
import signal
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir
from torchmuster.errors import MusterError
from torchmuster.launcher.api import keywords
from torchmuster.launcher.api.failures import NotLaunchedError
from torchmuster.launcher.api.launch import as_error, command, launch_by
from torchmuster.launcher.api.run import RunHandle

_END_S = 60.0
_numbers = itertools.count(1)


class SessionHandle:
    """A session started by `session`, by another process, or from the command line.

    As a context manager it ends after the block, with the runs that are still in it.

    Attributes:
        name: Its name for `muster run --session`.
        path: The run directory of the session's own run.
    """

    def __init__(self, name: str, run_dir: RunDir, clients: "_Clients | None" = None) -> None:
        self.name, self.path = name, run_dir.path
        self._dir = run_dir
        self._clients = clients
        self._runs: list[RunHandle] = []

    def __repr__(self) -> str:
        """Return the name."""
        return f"<torchmuster.Session {self.name}>"

    def __enter__(self) -> Self:
        """Return the session."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the session."""
        self.end()

    def launch(
        self, function: Callable[..., Any] | str | os.PathLike[str], *args: Any, **options: Any
    ) -> RunHandle:
        """Start a function, or a script, on the nodes of the session; return at once with the run.

        Keywords are those of `torchmuster.launch`, except those that the session has decided: `on`,
        `hosts`, `time` and so on.

        Args:
            function: The function that every worker calls, or the path of a script.
            args: The arguments for the function or script.
            options: The options of `muster run`, and the function's own keyword arguments.

        Raises:
            NotLaunchedError: As for `launch`; or another run is in the session, or it has ended.
        """
        if "session" in options:
            raise NotLaunchedError(
                f"`session` is {self.name} already", fix="torchmuster.launch(..., session=NAME)"
            )
        from torchmuster.multirun.views.sessions import find_session

        if self._clients is None or not self._clients.lives():
            try:
                find_session(self.name)
            except MusterError as error:
                raise NotLaunchedError(
                    error.what, where=error.where, why=error.why, fix=error.fix
                ) from None
            self._clients = _Clients()
        run = launch_by(self._clients.begin, function, args, {**options, "session": self.name})
        self._runs = [*(one for one in self._runs if not one.status().is_final), run]
        return run

    def run(self, script: str | os.PathLike[str], *args: Any, **options: Any) -> RunHandle:
        """Start a script on the session's nodes, as `launch` does; return at once with the run.

        Args:
            script: The path of the script (with `module=True`, the name of a module).
            args: The arguments of the script.
            options: The options of `muster run`.

        Raises:
            NotLaunchedError: As for `launch`.
        """
        return self.launch(os.fspath(script), *args, **options)

    def end(self) -> None:
        """Cancel this process's runs in the session and end it; return when it has ended.

        Further calls do nothing.

        Raises:
            torchmuster.errors.MusterError: The session has not ended within 40 s, or another
                process has a run in it.
        """
        from torchmuster.multirun.views.sessions import lives

        for run in self._runs:
            run.cancel(at_once=True)
        self._runs = []
        if self._clients is not None:
            self._clients.close()
            self._clients = None
        if lives(self._dir):
            _muster("session", "end", self.name)


def session(**options: Any) -> SessionHandle:
    """Hold nodes, and import torch on them; return when calls can start.

    Every long option of `muster session start` is a keyword: `nodes`, `nproc_per_node`, `on`,
    `hosts`, `preload`, `idle`, `time`, `python` and so on (docs/sessions.md). Durations are strings
    (`"30m"`) or `timedelta`.

    Args:
        options: The options of `muster session start`; without `name`, a unique one is chosen.

    Raises:
        NotLaunchedError: A keyword or a value can't be used, or the nodes can't be held.
    """
    from torchmuster.multirun.views.sessions import find_session

    keywords.check_session(options)
    name = options.setdefault("name", f"python-{os.getpid()}-{next(_numbers)}")
    words = keywords.words(options, "session")
    clients = _Clients()  # does its imports while the nodes import torch
    try:
        _muster("session", "start", *words)
        return SessionHandle(name, find_session(name).run_dir, clients)
    except NotLaunchedError as error:
        clients.close()
        raise keywords.for_keywords(error, options) from None
    except BaseException:  # interrupted: the caller does not want the session any more
        clients.close()
        with contextlib.suppress(MusterError):
            SessionHandle(name, find_session(name).run_dir).end()
        raise


def sessions() -> list[SessionHandle]:
    """Return all live sessions of this user, however they were started, newest first."""
    from torchmuster.multirun.views.sessions import living_sessions, name_of_session

    return [SessionHandle(name_of_session(one), one) for one in living_sessions()]


def _muster(*words: str) -> None:
    """Run a muster command and wait for it.

    Raises:
        NotLaunchedError: The command has failed.
    """
    with tempfile.TemporaryFile() as errors:
        child = proc.start(command(*words), stdout=errors.fileno(), stderr=errors.fileno())
        try:
            while (status := child.wait(0.5)) is None:
                pass
        except BaseException:
            child.send_signal(signal.SIGTERM)
            child.wait(_END_S)
            raise
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    if status != 0:
        raise as_error(text, status, f"muster {' '.join(words[:2])}")


class _Clients:
    """A child process that forks the client of each run, to save the start of an interpreter."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            fd = theirs.fileno()
            argv = command("session", "clients", str(fd))
            self._child = proc.start(argv, pass_fds=(fd,))
        # Also closes the process of a handle that nobody has ended.
        self.close = weakref.finalize(self, _end_clients, self._line, self._child)

    def lives(self) -> bool:
        """Return whether the process runs."""
        return self._child.poll() is None

    def begin(self, words: list[str], stdout: int, stderr: int) -> "_Client":
        """Start the client of a run.

        Raises:
            NotLaunchedError: The process has ended.
        """
        from torchmuster.multirun.cli.forks import PID, pack_order

        order = pack_order(words)
        try:
            with self._lock:
                socket.send_fds(self._line, [b"client"], array.array("i", [order, stdout, stderr]))
                (pid,) = PID.unpack(self._line.recv(PID.size))
        except (OSError, ValueError, TypeError) as error:
            raise NotLaunchedError(
                "the process that starts runs of this session has ended", why=str(error)
            ) from None
        finally:
            os.close(order)
        return _Client(pid)


def _end_clients(line: socket.socket, child: proc.Child) -> None:
    """End the process; clients that it has forked continue."""
    line.close()
    child.wait(_END_S)


class _Client:
    """The client of a run, whose parent is another process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def poll(self) -> int | None:
        """Return 0 if it has ended, otherwise None; the exit code is in the run directory."""
        return None if proc.is_running(self._pid) else 0

    def wait(self, timeout_s: float) -> int | None:
        """Return `poll()` at once: the caller has read its stdout to the end."""
        return self.poll()

    def send_signal(self, signum: int) -> None:
        """Send a signal to the client."""
        proc.kill_quietly(self._pid, signum)
