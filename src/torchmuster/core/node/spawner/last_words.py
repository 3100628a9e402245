"""What a worker tells its agent of itself: a debugger, where it stands, and how its script has ended.

Imported in the job's interpreter. A worker never fails because telling fails.
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
from torchmuster.core.model.failure import RanCode, RanFile
from torchmuster.core.net import ipc
from torchmuster.core.net.ipc import DebuggerHeld, WorkerEndedWell, WorkerFailed
from torchmuster.errors import UsageError

# Which code a worker has run: checksums of its script and of the project's modules that it has imported.
#
# Read when the script has ended. A file that has changed since the worker began may not be what was imported: it is marked.
# Imported in the job's interpreter.


_MOST_FILES = 200
_MOST_BYTES = 8 << 20
_MOST_PATH = 300
_NOT_OF_A_PROJECT = ("/site-packages/", "/dist-packages/")
_OURS = os.path.join(
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))), ""
)


class CodeNote:
    """Notes what rank 0 runs.

    Args:
        folder: What stands in front of `sys.path`; None for nothing.
    """

    def __init__(self, folder: str | None) -> None:
        self._cwd = os.getcwd()
        roots = {os.path.realpath(one) for one in (self._cwd, folder) if one}
        self._roots = tuple(os.path.join(root, "") for root in roots if root != "/")
        self._is_wanted = os.environ.get("RANK") == "0"
        self._since = time.time()
        self._script: tuple[str, bytes] | None = None

    def take_script(self, path: str, text: bytes) -> None:
        """Take the very bytes that are run."""
        self._script = os.path.realpath(path), text

    def read(self) -> RanCode | None:
        """Return what has run; None where that is not this worker's business, or can't be read."""
        if not self._is_wanted:
            return None
        try:
            return self._read()
        except Exception:  # noqa: BLE001 - a worker never fails because telling fails
            return None

    def _read(self) -> RanCode:
        from hashlib import sha256  # not before the script: it may have a module of this name

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
        """Return the files of the project that modules came from, without the script."""
        found: dict[str, None] = {}
        for module in list(sys.modules.values()):
            name: Any = getattr(module, "__file__", None)
            if not isinstance(name, str) or not os.path.isabs(name):  # as of some compiled modules
                continue
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
# And that of the program that has imported us, before it becomes the script: a session's door is one, too.
_OWN_FOLDERS = (
    _FOLDER,
    os.path.dirname(
        os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or __file__)
    ),
)
_kept: list[object] = []


# A good end: that it is one, and how large the world was. It is told when the threads of the script have ended and before
# its own exit handlers run: what kills the process later, such as a C++ thread that nobody has joined, is not the script's
# failure. The size is noted where torch itself notes it, because a script may have destroyed its groups by then.


class GroupWatch:
    """Notes the largest process group that this worker was ever in."""

    def __init__(self, *, forked: bool, imports_torch: bool) -> None:
        self._largest = 0
        self._imports_torch = imports_torch
        self._known = frozenset(sys.modules) if forked else frozenset[str]()
        self._sees = forked and self._wrap()

    def largest_group(self) -> int | None:
        """Return its size, 0 for none; None when that can't be told, or when the script does without torch."""
        if not self._sees or not (self._largest or self._uses_torch()):
            return None
        return self._largest

    def _wrap(self) -> bool:
        """Watch the function by which every way to make the default group ends; torch calls it by its name."""
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
        """Say whether the script, or a module that it has imported, imports torch: it was there before them."""
        new = [
            (name, module) for name, module in list(sys.modules.items()) if name not in self._known
        ]
        return self._imports_torch or any(
            name.startswith("torch.") or getattr(module, "__dict__", {}).get("torch") is not None
            for name, module in new
        )


def tell_at_exit(socket_path: str, watch: GroupWatch, note: CodeNote) -> None:
    """Tell the agent as soon as the interpreter begins to leave."""
    pid = os.getpid()

    def tell() -> None:
        if os.getpid() == pid:  # not what the script's own exit handlers may have forked
            said = WorkerEndedWell(largest_group=watch.largest_group(), code=note.read())
            ipc.tell(socket_path, said)

    if socket_path:
        atexit.register(tell)


# A bad end.


def strip_own_frames(error: BaseException) -> types.TracebackType | None:
    """Return the traceback from the user's first frame on; None for an error of our own."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _is_ours(frame: types.FrameType) -> bool:
    return os.path.dirname(frame.f_code.co_filename) in _OWN_FOLDERS


def report(socket_path: str, error: BaseException, note: CodeNote) -> None:
    """Tell the agent what ended this worker; a worker never fails because this fails."""
    told = _told_by(error)
    trace = strip_own_frames(error) if told is error else told.__traceback__
    try:
        lines = traceback.format_exception(type(told), told, trace)
        message = str(error)
        is_final = getattr(error, "muster_final", False) is True
        if _is_wrong_line(told):
            lines, is_final = _users_lines(told, trace), True
    except Exception as broken:  # noqa: BLE001 - a user's __str__ may do anything
        lines, message = [f"{type(error).__name__} (can't be shown: {broken!r})\n"], ""
        is_final = False
    name = type(error).__qualname__
    module = type(error).__module__
    full_name = name if module in ("builtins", "__main__") else f"{module}.{name}"
    text = "".join(lines)
    explain, own = getattr(error, "explain_to_user", None), None
    if callable(explain):  # our library's own errors say more than their traceback
        full_name, text, own = name, str(explain()), _own_words(error)
    told_of = WorkerFailed(
        type_name=full_name,
        message=message[:8192],
        where=user_line(told, trace),
        traceback=text if len(text) <= 65536 else f"{text[:16384]}\n...\n{text[-49152:]}",
        is_final=is_final,
        bases=tuple(base.__name__ for base in type(error).__mro__)[:32],
        handled=_last_line(told) if told is not error else None,
        own=own,
        code=note.read(),
        blames_node=getattr(error, "muster_blames_node", False) is True,
    )
    try:
        ipc.tell(socket_path, told_of)
    except UsageError:  # characters of many bytes: half a report is none
        short = told_of.traceback[-12_000:]
        ipc.tell(socket_path, replace(told_of, traceback=short, code=None))


def _own_words(error: BaseException) -> dict[str, str]:
    """Return the parts of an error of our own; its class is not imported here, the script's may be another version."""
    parts = {"at": "where", "because": "why", "hint": "fix"}
    found = {part: getattr(error, name, None) for part, name in parts.items()}
    return {part: str(value)[:8192] for part, value in found.items() if value}


def _told_by(error: BaseException) -> BaseException:
    """Return the error that says where it went wrong: that which a script was handling when it called sys.exit.

    So do frameworks in their own last `except`.
    """
    handled = error.__context__
    is_exit = isinstance(error, SystemExit) and isinstance(handled, Exception)
    return handled if is_exit and handled is not None else error


def _is_wrong_line(told: BaseException) -> bool:
    """Say whether a parser has refused the command line, or Python has found no module of that name."""
    if type(told).__module__ == "runpy" or type(told).__module__.startswith("click."):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(told.__traceback__)]
    by_parser = bool(frames) and os.path.basename(frames[-1].f_code.co_filename) == "argparse.py"
    return isinstance(told, SystemExit) and told.code == 2 and by_parser


def _users_lines(told: BaseException, trace: types.TracebackType | None) -> list[str]:
    """Return its traceback without the frames of libraries."""
    library = os.path.dirname(os.__file__)  # with site-packages below it
    frames = traceback.extract_tb(trace)
    own = [f for f in frames if not f.filename.startswith((library, "<frozen"))]
    return [*traceback.format_list(own), *traceback.format_exception_only(type(told), told)]


def _last_line(error: BaseException) -> str:
    with contextlib.suppress(Exception):  # a user's __str__ may do anything
        return (
            traceback.format_exception_only(type(error), error)[0]
            .strip()
            .splitlines()[0]
            .removeprefix("runpy._Error: ")
        )
    return type(error).__name__


def user_line(error: BaseException, trace: types.TracebackType | None) -> str | None:
    """Return `file:line` of the innermost frame in the user's own code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    library = os.path.dirname(os.__file__)  # sysconfig may be a file of the script's
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(trace)]
    ours = _OURS
    own = [
        (name, line)
        for name, line in frames
        if not name.startswith(("<frozen", ours, library))
        and "/site-packages/" not in name
        and "/dist-packages/" not in name
    ]
    package = os.path.dirname(ours)
    chosen = own or [frame for frame in frames if not frame[0].startswith(package)]
    return f"{chosen[-1][0]}:{chosen[-1][1]}" if chosen else None


# The debugger.


def _import_debugger() -> Any:
    """Import pdb without readline, which would catch SIGWINCH (from Python 3.13 on)."""
    absent = "readline" not in sys.modules
    if absent:
        sys.modules["readline"] = None  # type: ignore[assignment]  # importing it fails
    try:
        return importlib.import_module("pdb")
    finally:
        if absent:
            for name in ("readline", "rlcompleter"):
                sys.modules.pop(name, None)


pdb = _import_debugger()  # before the script, so that its sessions can be noticed


def notice_the_debugger(socket_path: str) -> None:
    """Tell the agent while a debugger holds this worker, so that no restart ends the session."""
    if not socket_path:
        return
    interaction = pdb.Pdb.interaction
    stop_here = pdb.Pdb.stop_here

    @functools.wraps(interaction)
    def noticed(self: Any, *rest: Any) -> None:
        ipc.tell(socket_path, DebuggerHeld(active=True))
        try:
            interaction(self, *rest)
        finally:
            ipc.tell(socket_path, DebuggerHeld(active=False))

    @functools.wraps(stop_here)
    def never_in_ours(self: Any, frame: types.FrameType) -> bool:
        """Who steps out of the script has left it."""
        return not _is_ours(frame) and stop_here(self, frame)

    pdb.Pdb.interaction = noticed
    pdb.Pdb.stop_here = never_in_ours


# Stacks: also while C code holds the GIL. A descriptor far above those of a script, and a signal that nobody sends by chance.
# The script's own handlers, and what it does with `faulthandler` itself, are not touched: one that takes this signal keeps it.


def write_stacks_on_signal(socket_path: str) -> None:
    """Register; a worker never fails because this fails."""
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
    if absent:  # the script imports it when it wants it
        _kept.append(sys.modules.pop("faulthandler"))


# A debugger that a user brings to this worker from outside: debugpy before the script, pdb after its exception.
#
# The worker listens on a Unix socket in the folder of its agent, which only this user can enter, and tells the agent that it
# waits. Who calls is `launcher/programs/debugger.py`, started by the agent for an authenticated client, as a command of `muster exec`.
# debugpy wants a port: it calls back on one of the loopback that this program has opened and checks.
#
# Imported in the job's interpreter.


WAIT_S = 3600.0
_CALL_S = 30.0
_LOOK_EVERY_S = 0.05
_GROUP_TIMEOUT = timedelta(days=1)
_PORT = struct.Struct("!H")


class Debugging:
    """What this worker was asked for.

    Args:
        socket_path: Of the agent; empty where there is none.
        environment: Of this process; what is for muster alone is taken out of it.
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
        """Wait for an editor, if this is the rank for one."""
        if self._tool != contract.DEBUGPY or not self._is_meant:
            return
        caller = self._wait(self._tool)
        if caller is None:
            return
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning of five lines
        debugpy: Any = importlib.import_module("debugpy")
        wait_for_client, begins = debugpy.wait_for_client, threading.Event()

        def hold() -> None:
            with contextlib.suppress(OSError):
                while caller.recv(1):
                    pass
            self._tell(active=False)
            while (
                not begins.is_set()
            ):  # an editor that leaves before the first step lets the script begin
                with contextlib.suppress(RuntimeError):  # this wait has not begun
                    wait_for_client.cancel()
                _go_on()
                begins.wait(_LOOK_EVERY_S)

        with contextlib.suppress(OSError):
            caller.settimeout(_CALL_S)
            caller.sendall(contract.CALLS_BACK)
            (port,) = _PORT.unpack(caller.recv(_PORT.size, socket.MSG_WAITALL))
            caller.settimeout(None)
            thread = threading.Thread(target=hold, name="debugger", daemon=True)
            thread.pydev_do_not_trace = True  # type: ignore[attr-defined]  # it has to run while all others are stopped
            thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
            thread.start()
            debugpy.connect(("127.0.0.1", port))
            wait_for_client()
            begins.set()

    def post_mortem(self, error: BaseException) -> None:
        """Let the user look at what has ended the script, if this was asked for."""
        trace = strip_own_frames(error)
        is_exit = isinstance(error, SystemExit | KeyboardInterrupt)
        if self._tool != contract.PDB or not self._is_meant or is_exit or trace is None:
            return
        caller = self._wait(self._tool)
        if caller is None:
            return
        # A user who leaves breaks the pipe; then the run ends as it would have.
        with contextlib.suppress(OSError), caller.makefile("rw", encoding="utf-8") as stream:
            caller.sendall(contract.STREAMS)
            traceback.print_exception(type(error), error, trace, file=stream)
            session = pdb.Pdb(stdin=stream, stdout=stream, nosigint=True)
            session.reset()
            session.interaction(None, trace)
        caller.close()

    def stop_at(self, frame: types.FrameType, text: str) -> bool:
        """Let the user look at a frame of the script, which has not failed; say whether it goes on (`c`)."""
        caller = self._wait(contract.PDB_STOPS)
        if caller is None:
            return True
        goes_on = False
        with contextlib.suppress(OSError), caller.makefile("rw", encoding="utf-8") as stream:
            caller.sendall(contract.STREAMS)
            stream.write(f"{text}\n")
            session = pdb.Pdb(stdin=stream, stdout=stream, nosigint=True)
            session.reset()
            session.interaction(frame, None)
            goes_on = not session.quitting
        caller.close()
        return goes_on

    def _wait(self, tool: str) -> socket.socket | None:
        """Return a connection with the user's debugger; None when nobody has come."""
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
        ipc.tell(self._agent, DebuggerHeld(active=active, waits=waits, folder=folder))


def stop_at(socket_path: str, rank: str, frame: types.FrameType, text: str) -> bool:
    """Let the user look at a frame of this rank's script, if the run was started with a debugger; say whether it goes on."""
    environment = {"RANK": rank, contract.DEBUGGER_VARIABLE: contract.PDB}
    return Debugging(socket_path, environment).stop_at(frame, text)


def _go_on() -> None:
    """End the wait for an editor's settings in `connect`, which debugpy has no call for."""
    find: Any = getattr(sys.modules.get("pydevd"), "get_global_debugger", None)
    debugger: Any = find() if find is not None else None
    if hasattr(debugger, "ready_to_run"):
        debugger.ready_to_run = True


def _lengthen_timeouts() -> None:
    """Let the other ranks wait in their collectives for as long as somebody thinks; a timeout of the script's own stays."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        if isinstance(getattr(distributed, name, None), timedelta):
            setattr(distributed, name, _GROUP_TIMEOUT)


def what_is_missing(environment: MutableMapping[str, str]) -> str | None:
    """Return why the debugger that was asked for can't be had in this interpreter; None if it can."""
    tool = environment.get(contract.DEBUGGER_VARIABLE, "").partition(" ")[0]
    if tool != contract.DEBUGPY or importlib.util.find_spec("debugpy") is not None:
        return None
    return f"it has no debugpy, which --debugpy needs: {sys.executable} -m pip install debugpy"
