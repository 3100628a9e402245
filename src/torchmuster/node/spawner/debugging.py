"""A debugger that a user brings to this worker from outside: debugpy before the script, pdb after its exception.

The worker listens on a Unix socket in the folder of its agent, which only this user can enter, and tells the agent that it
waits. Who calls is `programs/debugger.py`, started by the agent for an authenticated client, as a command of `muster exec`.
debugpy wants a port: it calls back on one of the loopback that this program has opened and checks.

Imported in the job's interpreter.
"""

import contextlib
import importlib
import importlib.util
import os
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

from torchmuster.model import contract
from torchmuster.net import ipc
from torchmuster.net.ipc_messages import DebuggerHeld
from torchmuster.node.spawner import last_words

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
        trace = last_words.strip_own_frames(error)
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
            session = last_words.pdb.Pdb(stdin=stream, stdout=stream, nosigint=True)
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
            session = last_words.pdb.Pdb(stdin=stream, stdout=stream, nosigint=True)
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
