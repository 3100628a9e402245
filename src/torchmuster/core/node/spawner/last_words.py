"""What a worker reports to its agent: a debugger, its stacks, and how its script has ended.

Imported in the job's interpreter. A failed report never fails the worker.
"""

import atexit
import contextlib
import fcntl
import functools
import importlib
import importlib.util
import os
import socket
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import MutableMapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torchmuster.core.model import contract
from torchmuster.core.model.failure import ErrorParts, PythonError, RanCode, RanFile
from torchmuster.core.net import ipc
from torchmuster.errors import UsageError

# Which code a worker has run: checksums of its script and of the project modules it has imported.
#
# They are read when the script has ended. A file that has changed since the worker began may not be
# the one that was imported, so it is marked.


_MOST_FILES = 200
_MOST_BYTES = 8 << 20
_MOST_PATH = 300
_NOT_OF_A_PROJECT = ("/site-packages/", "/dist-packages/")
_OURS = os.path.join(
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))), ""
)


class CodeNote:
    """Records which code rank 0 runs.

    Args:
        folder: The folder in front of `sys.path`; None for none.
    """

    def __init__(self, folder: str | None) -> None:
        self._cwd = os.getcwd()
        roots = {os.path.realpath(one) for one in (self._cwd, folder) if one}
        self._roots = tuple(os.path.join(root, "") for root in roots if root != "/")
        self._is_wanted = os.environ.get("RANK") == "0"
        self._since = time.time()
        self._script: tuple[str, bytes] | None = None

    def take_script(self, path: str, text: bytes) -> None:
        """Record the very bytes of the script that is run."""
        self._script = os.path.realpath(path), text

    def read(self) -> RanCode | None:
        """Return the code that has run; None on other ranks, or if it can't be read."""
        if not self._is_wanted:
            return None
        try:
            return self._read()
        except Exception:  # noqa: BLE001 - a failed report never fails the worker
            return None

    def _read(self) -> RanCode:
        from hashlib import sha256  # not earlier: the script may have a module of this name

        found: list[RanFile] = []
        if self._script is not None:
            path, text = self._script
            found.append(RanFile(path=self._short(path), sha256=sha256(text).hexdigest()))
        paths = self._project_files()
        for path in paths[: _MOST_FILES - len(found)]:
            try:
                status = os.stat(path)
                with open(path, "rb") as file:
                    text = file.read(_MOST_BYTES)
            except OSError:
                continue
            changed = max(status.st_ctime, status.st_mtime) > self._since
            checksum = sha256(text).hexdigest()
            found.append(RanFile(path=self._short(path), sha256=checksum, changed=changed))
        num_all = len(paths) + (self._script is not None)
        return RanCode(files=tuple(found), num_left_out=num_all - len(found))

    def _project_files(self) -> list[str]:
        """Return the project's files that modules were imported from, without the script."""
        found: dict[str, None] = {}
        for module in list(sys.modules.values()):
            name: Any = getattr(module, "__file__", None)
            if not isinstance(name, str) or not os.path.isabs(name):
                continue  # as with some compiled modules
            path = os.path.realpath(name)
            is_own = path.startswith(self._roots) and not path.startswith(_OURS)
            if is_own and not any(part in path for part in _NOT_OF_A_PROJECT):
                found[path] = None
        if self._script is not None:
            found.pop(self._script[0], None)
        return sorted(found)

    def _short(self, path: str) -> str:
        root = os.path.join(os.path.realpath(self._cwd), "")
        return path.removeprefix(root)[-_MOST_PATH:]


_FOLDER = os.path.dirname(__file__)
# Also the folder of the program that imports us before it becomes the script, such as a session's
# server.
OWN_FOLDERS = {
    _FOLDER,
    os.path.dirname(
        os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or __file__)
    ),
}
_kept: list[object] = []


# A successful end, and how large the world was. It is reported after the script's threads have
# ended and before its own exit handlers run: what kills the process later, such as an unjoined C++
# thread, is not the script's failure. The size is recorded where torch itself records it, because a
# script may have destroyed its groups by then.


class GroupWatch:
    """Records the size of the largest process group that this worker was ever in."""

    def __init__(self, *, forked: bool, imports_torch: bool) -> None:
        self._largest = 0
        self._imports_torch = imports_torch
        self._known = frozenset(sys.modules) if forked else frozenset[str]()
        self._sees = forked and self._wrap()

    def largest_group(self) -> int | None:
        """Return its size, 0 for none; None if unknown, or if the script doesn't use torch."""
        if not self._sees or not (self._largest or self._uses_torch()):
            return None
        return self._largest

    def _wrap(self) -> bool:
        """Wrap the function with which torch sets the default group, and which it calls by name."""
        distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
        update = getattr(distributed, "_update_default_pg", None)
        if update is None:
            return False

        @functools.wraps(update)
        def noted(group: Any) -> None:
            update(group)
            size = getattr(group, "size", None)  # None at the end of a group
            if callable(size):
                self._largest = max(self._largest, int(size()))

        distributed._update_default_pg = noted
        return True

    def _uses_torch(self) -> bool:
        """Return whether the script, or a module it has imported, uses torch.

        `sys.modules` can't tell: torch was imported before.
        """
        new = [
            (name, module) for name, module in list(sys.modules.items()) if name not in self._known
        ]
        return self._imports_torch or any(
            name.startswith("torch.") or getattr(module, "__dict__", {}).get("torch") is not None
            for name, module in new
        )


def tell_at_exit(socket_path: str, watch: GroupWatch, note: CodeNote) -> None:
    """Report the successful end as soon as the interpreter begins to exit."""
    pid = os.getpid()

    def tell() -> None:
        if os.getpid() == pid:  # not in what the script's own exit handlers may have forked
            said = ipc.WorkerEndedWell(largest_group=watch.largest_group(), code=note.read())
            ipc.tell(socket_path, said)

    if socket_path:
        atexit.register(tell)


# A failure.


def strip_own_frames(error: BaseException) -> types.TracebackType | None:
    """Return the traceback from the user's first frame on; None for our own error."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _is_ours(frame: types.FrameType) -> bool:
    return os.path.dirname(frame.f_code.co_filename) in OWN_FOLDERS


def report(socket_path: str, error: BaseException, note: CodeNote) -> None:
    """Report to the agent which exception ended this worker; a failed report raises nothing."""
    named = _error_to_name(error)
    trace = strip_own_frames(error) if named is error else named.__traceback__
    try:
        lines = traceback.format_exception(type(named), named, trace)
        message = str(error)
        is_final = getattr(error, "muster_final", False) is True
        if type(error).__module__ == "bdb":  # left by hand, or a prompt that has no terminal
            is_final = True
        if _is_wrong_line(named):
            lines, is_final = _users_lines(named, trace), True
    except Exception as broken:  # noqa: BLE001 - a user's __str__ may do anything
        lines, message = [f"{type(error).__name__} (can't be shown: {broken!r})\n"], ""
        is_final = False
    name = type(error).__qualname__
    module = type(error).__module__
    full_name = name if module in ("builtins", "__main__") else f"{module}.{name}"
    text = "".join(lines)
    explain, own = getattr(error, "explain_to_user", None), None
    if callable(explain):  # our library's errors explain more than their traceback
        full_name, text, own = name, str(explain()), _own_words(error)
    python_error = PythonError(
        type_name=full_name,
        message=message[:8192],
        where=user_line(named, trace),
        traceback=text if len(text) <= 65536 else f"{text[:16384]}\n...\n{text[-49152:]}",
        is_final=is_final,
        bases=tuple(base.__name__ for base in type(error).__mro__)[:32],
        handled=_last_line(named)[:8192] if named is not error else None,
        own=own,
        blames_node=getattr(error, "muster_blames_node", False) is True,
    )
    try:
        ipc.tell(socket_path, ipc.WorkerFailed(error=python_error, code=note.read()))
    except UsageError:  # non-ASCII characters may make it too long
        traceback_end = python_error.traceback[-12_000:]  # it has our own words, too
        short = replace(python_error, traceback=traceback_end, handled=None, own=None)
        ipc.tell(socket_path, ipc.WorkerFailed(error=short))


def _own_words(error: BaseException) -> ErrorParts:
    """Return the parts of an error of our library.

    Its class is not imported here: the script's may be of another version.
    """
    found = (getattr(error, name, None) for name in ("where", "why", "fix"))
    at, because, hint = (str(value or "")[:8192] for value in found)
    return ErrorParts(at=at or None, because=tuple(because.splitlines()), hint=hint or None)


def _error_to_name(error: BaseException) -> BaseException:
    """Return the error that explains the end.

    That is the one that a script, or a framework in its last `except`, handled when it called
    sys.exit.
    """
    handled = error.__context__
    is_exit = isinstance(error, SystemExit) and isinstance(handled, Exception)
    return handled if is_exit and handled is not None else error


def _is_wrong_line(error: BaseException) -> bool:
    """Return whether a parser refused the command line, or Python found no such module."""
    if type(error).__module__ == "runpy" or type(error).__module__.startswith("click."):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    by_parser = bool(frames) and os.path.basename(frames[-1].f_code.co_filename) == "argparse.py"
    return isinstance(error, SystemExit) and error.code == 2 and by_parser


def _users_lines(error: BaseException, trace: types.TracebackType | None) -> list[str]:
    """Return the traceback without the frames of libraries."""
    library = os.path.dirname(os.__file__)  # with site-packages below it
    frames = traceback.extract_tb(trace)
    own = [f for f in frames if not f.filename.startswith((library, "<frozen"))]
    return [*traceback.format_list(own), *traceback.format_exception_only(type(error), error)]


def _last_line(error: BaseException) -> str:
    with contextlib.suppress(Exception):  # a user's __str__ may do anything
        text = traceback.format_exception_only(type(error), error)[0]
        return text.strip().splitlines()[0].removeprefix("runpy._Error: ")
    return type(error).__name__


def user_line(error: BaseException, trace: types.TracebackType | None) -> str | None:
    """Return `file:line` of the innermost frame in the user's own code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    library = os.path.dirname(os.__file__)  # sysconfig may be a file of the script's
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(trace)]
    own = [
        (name, line)
        for name, line in frames
        if not name.startswith(("<frozen", _OURS, library))
        and "/site-packages/" not in name
        and "/dist-packages/" not in name
    ]
    package = os.path.dirname(_OURS)
    chosen = own or [frame for frame in frames if not frame[0].startswith(package)]
    return f"{chosen[-1][0]}:{chosen[-1][1]}" if chosen else None


# The debugger.


def _import_debugger() -> Any:
    """Import pdb without readline, which would catch SIGWINCH (from Python 3.13 on)."""
    absent = "readline" not in sys.modules
    if absent:
        sys.modules["readline"] = None  # type: ignore[assignment]  # makes its import fail
    try:
        return importlib.import_module("pdb")
    finally:
        if absent:
            for name in ("readline", "rlcompleter"):
                sys.modules.pop(name, None)


pdb = _import_debugger()  # before the script, to notice its sessions


def notice_the_debugger(socket_path: str) -> None:
    """Tell the agent whenever pdb stops this worker, so that no restart ends the session."""
    if not socket_path:
        return
    interaction = pdb.Pdb.interaction
    stop_here = pdb.Pdb.stop_here

    @functools.wraps(interaction)
    def noticed(self: Any, *rest: Any) -> None:
        ipc.tell(socket_path, ipc.DebuggerHeld(active=True))
        try:
            interaction(self, *rest)
        finally:
            ipc.tell(socket_path, ipc.DebuggerHeld(active=False))

    @functools.wraps(stop_here)
    def never_in_ours(self: Any, frame: types.FrameType) -> bool:
        """Don't stop in our own frames: a user who steps out of the script has left it."""
        return not _is_ours(frame) and stop_here(self, frame)

    pdb.Pdb.interaction = noticed
    pdb.Pdb.stop_here = never_in_ours


# Stacks, available even while C code holds the GIL. They use a descriptor far above those of a
# script, and a signal that nobody sends by chance. The script's own handlers and use of
# `faulthandler` are not touched: if it handles this signal, it keeps it.


def write_stacks_on_signal(socket_path: str) -> None:
    """Write the stacks to a file on a signal; a failure here doesn't fail the worker."""
    rank, attempt = os.environ.get("RANK"), os.environ.get(contract.ATTEMPT_VARIABLE)
    if not socket_path or rank is None or attempt is None:
        return
    path = contract.stacks_path(os.path.dirname(socket_path), attempt, rank)
    with contextlib.suppress(Exception):
        _register(path)


def _register(path: str) -> None:
    absent = "faulthandler" not in sys.modules
    import faulthandler

    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    low = os.open(path, flags, 0o600)
    try:
        fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, contract.STACK_FD)
    finally:
        os.close(low)
    if fd != contract.STACK_FD:  # the agent looks there and nowhere else
        os.close(fd)
        return
    faulthandler.register(contract.STACK_SIGNAL, file=fd, all_threads=True, chain=False)
    if absent:  # the script imports it itself if it needs it
        _kept.append(sys.modules.pop("faulthandler"))


# A debugger that a user attaches from outside: debugpy before the script, pdb after its exception.
#
# The worker listens on a Unix socket in its agent's folder, which only this user can enter, and
# tells the agent that it waits. The caller is `launcher/programs/debugger.py`, which the agent
# starts for an authenticated client as a command of `muster exec`. debugpy needs a port, so it
# calls back on a loopback port that this program has opened and checks.


WAIT_S = 3600.0
_CALL_S = 30.0
_LOOK_EVERY_S = 0.05
_GROUP_TIMEOUT = timedelta(days=1)
_PORT = struct.Struct("!H")


class Debugging:
    """The debugger that was requested for this worker.

    Args:
        socket_path: The agent's socket; empty if there is none.
        environment: This process's variables, from which muster's own are removed.
    """

    def __init__(self, socket_path: str, environment: MutableMapping[str, str]) -> None:
        self._agent = socket_path
        self._rank = environment.get("RANK", "")
        word = environment.pop(contract.DEBUGGER_VARIABLE, "") if socket_path else ""
        self._tool, _, rank = word.partition(" ")
        self._is_meant = bool(self._rank) and (not rank or rank == self._rank)
        if self._tool:
            _lengthen_timeouts()

    def before_script(self) -> None:
        """Wait for an editor, if one is to attach to this rank."""
        if self._tool != contract.DEBUGPY or not self._is_meant:
            return
        caller = self._wait(self._tool)
        if caller is None:
            return
        # Avoids a warning of five lines.
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        debugpy: Any = importlib.import_module("debugpy")
        wait_for_client, begins = debugpy.wait_for_client, threading.Event()

        def hold() -> None:
            with contextlib.suppress(OSError):
                while caller.recv(1):
                    pass
            self._tell(active=False)
            # If the editor leaves before the first step, the script starts.
            while not begins.is_set():
                with contextlib.suppress(RuntimeError):  # the wait has not begun
                    wait_for_client.cancel()
                _go_on()
                begins.wait(_LOOK_EVERY_S)

        with contextlib.suppress(OSError):
            caller.settimeout(_CALL_S)
            caller.sendall(contract.CALLS_BACK)
            (port,) = _PORT.unpack(caller.recv(_PORT.size, socket.MSG_WAITALL))
            caller.settimeout(None)
            thread = threading.Thread(target=hold, name="debugger", daemon=True)
            # It has to run while all other threads are stopped.
            thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
            thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
            thread.start()
            debugpy.connect(("127.0.0.1", port))
            wait_for_client()
            begins.set()

    def post_mortem(self, error: BaseException) -> None:
        """Let the user inspect the error that ended the script, if that was requested."""
        trace = strip_own_frames(error)
        is_exit = isinstance(error, SystemExit | KeyboardInterrupt)
        if self._tool != contract.PDB or not self._is_meant or is_exit or trace is None:
            return
        caller = self._wait(self._tool)
        if caller is None:
            return
        text = "".join(traceback.format_exception(type(error), error, trace))
        _converse(caller, text, None, trace)  # then the run ends as usual

    def stop_at(self, frame: types.FrameType, text: str) -> bool:
        """Let the user inspect a frame of the running script; return whether to continue (`c`)."""
        caller = self._wait(contract.PDB_STOPS)
        return caller is None or _converse(caller, f"{text}\n", frame, None)

    def _wait(self, tool: str) -> socket.socket | None:
        """Return a connection to the user's debugger; None if none connects in time."""
        path = contract.debugger_socket(self._agent, self._rank)
        with socket.socket(socket.AF_UNIX) as listener:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(WAIT_S)
            self._tell(active=True, waits=tool)
            try:
                while True:
                    caller, _ = listener.accept()
                    if ipc.caller_of(caller) is not None:
                        return caller
                    caller.close()
            except TimeoutError:
                self._tell(active=False)
                sys.stderr.write(
                    f"muster: no debugger came within {WAIT_S:g} s: this rank goes on\n"
                )
                return None
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _tell(self, *, active: bool, waits: str = "") -> None:
        folder = os.getcwd() if waits else ""
        ipc.tell(self._agent, ipc.DebuggerHeld(active=active, waits=waits, folder=folder))


def _converse(
    caller: socket.socket,
    text: str,
    frame: types.FrameType | None,
    trace: types.TracebackType | None,
) -> bool:
    """Run pdb over a connection, after a text; return whether the user wants to continue."""
    goes_on = False
    # A user who leaves breaks the pipe.
    with caller, contextlib.suppress(OSError), caller.makefile("rw", encoding="utf-8") as stream:
        caller.sendall(contract.STREAMS)
        stream.write(text)
        session = pdb.Pdb(stdin=stream, stdout=stream, nosigint=True)
        session.reset()
        session.interaction(frame, trace)
        goes_on = not session.quitting
    return goes_on


def stop_at(socket_path: str, rank: str, frame: types.FrameType, text: str) -> bool:
    """Let the user inspect a frame of this rank's script; return whether to continue."""
    environment = {"RANK": rank, contract.DEBUGGER_VARIABLE: contract.PDB}
    return Debugging(socket_path, environment).stop_at(frame, text)


def _go_on() -> None:
    """End the wait for an editor's settings in `connect`, for which debugpy has no function."""
    find: Any = getattr(sys.modules.get("pydevd"), "get_global_debugger", None)
    debugger: Any = find() if find is not None else None
    if hasattr(debugger, "ready_to_run"):
        debugger.ready_to_run = True


def _lengthen_timeouts() -> None:
    """Lengthen the default timeouts, so that other ranks wait in their collectives.

    A timeout that the script sets stays.
    """
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        if isinstance(getattr(distributed, name, None), timedelta):
            setattr(distributed, name, _GROUP_TIMEOUT)


def what_is_missing(environment: MutableMapping[str, str]) -> str | None:
    """Return why the requested debugger is not available in this interpreter; None if it is."""
    tool = environment.get(contract.DEBUGGER_VARIABLE, "").partition(" ")[0]
    if tool != contract.DEBUGPY or importlib.util.find_spec("debugpy") is not None:
        return None
    return f"it has no debugpy, which --debugpy needs: {sys.executable} -m pip install debugpy"
