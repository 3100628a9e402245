"""The client's hand on a host reached by ssh: it keeps the agent, carries bytes, and ends all when the client is gone.

    remote --root=ROOT [--importable] [--temporary]

Frames of `net/frames.py` come on standard input and go to standard output. The end of input, or silence for 20 s, is the
end of the run on this host: the agent's lifeline is cut, after 5 s everything below is killed, the secret is removed.
"""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.files import atomic, code_copy
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.plan import RunPlan
from torchmuster.net import frames, listener
from torchmuster.net.address import own_addresses
from torchmuster.net.frames import FrameError, FrameReader, FrameWriter, Kind
from torchmuster.node.remote import files as courier_files
from torchmuster.node.remote.files import CodeOutputs, FrameStream, RecordStream

if TYPE_CHECKING:
    from torchmuster.node.remote.tasks import CourierTasks

SILENCE_S = 20.0
_GENTLE_S = 5.0
_KILL_S = 5.0
_CALL_S = 5.0


class _ClientGoneError(Exception):
    """There is nobody any more who wants this run."""


class RemoteEnd:
    """One host's side of one session."""

    def __init__(self, reader: FrameReader, writer: FrameWriter, root: str, *, importable: bool):
        self._reader = reader
        self._writer = writer
        self._root = root
        self._importable = importable
        self._run_dir: RunDir | None = None
        self._own_run_dir = False
        self._secret_inode = 0
        self._record: RecordStream | None = None
        self._code: CodeOutputs | None = None
        self._lifeline: tuple[int, int] | None = None
        self._agent: proc.Child | None = None
        self._watcher: threading.Thread | None = None
        self._port = 0
        self._calls: dict[int, socket.socket] = {}
        self._tasks: CourierTasks | None = None

    def serve(self) -> None:
        """Do what the client says until it is gone."""
        try:
            while True:
                kind, payload = self._next()
                if kind == Kind.END:
                    return
                self._take(kind, payload)
        except _ClientGoneError:
            return

    def _next(self) -> tuple[int, bytes]:
        """Return the next frame that is no ping."""
        while True:
            try:
                frame = self._reader.read(SILENCE_S)
            except (TimeoutError, FrameError, OSError) as error:
                raise _ClientGoneError from error
            if frame is None:
                raise _ClientGoneError
            if frame[0] != Kind.PING:
                return frame
            self._writer.send(frames.pack(Kind.PONG))

    def _take(self, kind: int, payload: bytes) -> None:
        match kind:
            case Kind.SETUP:
                self._report_failure(self._set_up, frames.read_json(payload))
            case Kind.START:
                self._report_failure(self._start_agent, frames.read_json(payload))
            case Kind.CUT:
                self._cut_lifeline()
            case Kind.KILL:
                for pid in proc.descendants(os.getpid()):
                    proc.kill_quietly(pid)
            case Kind.COLLECT:
                self._collect()
            case Kind.RELAY_OPEN | Kind.RELAY_DATA | Kind.RELAY_CLOSE:
                self._relay(kind, *frames.read_relay(payload))
            case Kind.TASKS | Kind.SPAWN | Kind.WITHDRAW | Kind.ANSWER:
                self._take_of_tasks(kind, frames.read_json(payload))

    def _take_of_tasks(self, kind: int, value: dict[str, Any]) -> None:
        if self._tasks is None:
            from torchmuster.node.remote.tasks import CourierTasks  # a run has none

            environment = self._environment() or dict(os.environ)
            self._tasks = CourierTasks(self._root, self._writer, environment, self._carry_call)
        tasks = self._tasks
        actions = {Kind.TASKS: tasks.set_up, Kind.SPAWN: tasks.spawn}
        actions |= {Kind.WITHDRAW: tasks.withdraw, Kind.ANSWER: tasks.answer}
        actions[Kind(kind)](value)

    def _report_failure(self, action: Any, value: dict[str, Any]) -> None:
        try:
            action(value)
        except MusterError as error:
            self._fail(error.what, error.where, error.why, error.fix)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._fail("the run can't be set up there", None, f"{type(error).__name__}: {error}")

    def _fail(self, what: str, where: str | None, why: str | None, fix: str | None = None) -> None:
        value = {"what": what, "where": where, "why": why, "fix": fix}
        self._writer.send(frames.pack_json(Kind.FAIL, value))

    # Where the run lives on this host.

    def _set_up(self, value: dict[str, Any]) -> None:
        token = value["token"]
        plan = codec.from_plain(RunPlan, value["plan"])
        head = value["head_run_dir"]
        sees_client = value["may_share"] and _sees_run(value["run_dir"], token)
        has_code = value["may_share"] and _has_code(value["script"], plan.program.cwd)
        with_head = False
        if sees_client and has_code:
            self._run_dir = RunDir(value["run_dir"])
        elif head is not None and _sees_run(head, token) and _has_mark(head, value["head_mark"]):
            self._run_dir, with_head = RunDir(head), True
        else:
            self._run_dir = courier_files.make_own_run_dir(plan.run_id, token)
            self._own_run_dir = True
        lacks_code = self._own_run_dir and not has_code
        if lacks_code:
            self._code = CodeOutputs(os.path.join(self._run_dir.path, "code"))
        wants_code = self._code is not None and not self._code.is_there
        placed = {
            "run_dir": self._run_dir.path,
            "mark": courier_files.mark_of(self._run_dir),
            "shared": sees_client and has_code,
            "with_head": with_head,
            "wants_code": wants_code,
            "copied": lacks_code,
        }
        self._writer.send(frames.pack_json(Kind.PLACED, placed))
        if wants_code and self._code is not None:
            self._code.unpack(FrameStream(self._next_piece))
        note = self._write_run(plan, value) if self._own_run_dir else None
        self._writer.send(frames.pack_json(Kind.READY, {"note": note}))

    def _next_piece(self) -> bytes:
        kind, payload = self._next()
        if kind != Kind.CODE:
            raise ValueError(f"a frame of kind {kind} inside of the code")
        return payload

    def _write_run(self, plan: RunPlan, value: dict[str, Any]) -> str | None:
        """Write plan and secret; return a sentence when the interpreter is another than asked for."""
        from dataclasses import replace

        run_dir = self._run_dir
        if run_dir is None:
            raise ValueError("there is no run directory")
        program, note = plan.program, None
        if self._code is not None:
            program = code_copy.moved(program, value["code_root"], self._code.root)
        if shutil.which(program.python[0]) is None:
            found = shutil.which("python3") or shutil.which("python")
            if found is None:
                what = f"there is no {program.python[0]} and no python3 for the script"
                raise MusterError(what, fix="python = [...] in the engine's section, or --python")
            note = f"{program.python[0]} is not there: the script runs with {found}"
            program = replace(program, python=(found, *program.python[1:]))
        atomic.write_json(run_dir.plan, codec.to_plain(replace(plan, program=program)))
        courier_files.write_private(run_dir.secret, value["secret"])
        self._secret_inode = os.stat(run_dir.secret).st_ino
        self._record = RecordStream(run_dir, self._writer)
        self._record.start()
        return note

    # The agent.

    def _start_agent(self, value: dict[str, Any]) -> None:
        if self._run_dir is None:
            raise ValueError("the run has no directory yet")
        if self._watcher is not None:
            self._watcher.join(_GENTLE_S + _KILL_S)
        if self._lifeline is None:
            self._lifeline = os.pipe2(os.O_CLOEXEC)
        fds = [self._lifeline[0]]
        listening = listener.bind("0.0.0.0", 0) if value["is_head"] else None
        heads = [(str(host), int(port)) for host, port in value["heads"]]
        if listening is not None:
            self._port = int(listening.getsockname()[1])
            heads = [("127.0.0.1", self._port)]
            fds.append(listening.fileno())
        argv = self._agent_argv(value, heads)
        if listening is not None:
            argv += [f"--listen-fd={listening.fileno()}"]
            argv += [f"--first-attempt={int(value['first_attempt'])}"]
            argv += [f"--restarts-spent={int(value['restarts_spent'])}"]
        agent = proc.start(argv, env=self._environment(), pass_fds=fds)
        if listening is not None:
            listening.close()
        self._agent = agent
        started = {"pid": agent.pid, "port": self._port, "addresses": own_addresses()}
        self._writer.send(frames.pack_json(Kind.STARTED, started))
        self._watcher = threading.Thread(target=self._watch, args=(agent,), daemon=True)
        self._watcher.start()

    def _agent_argv(self, value: dict[str, Any], heads: list[tuple[str, int]]) -> list[str]:
        if self._run_dir is None or self._lifeline is None:
            raise ValueError("the run has no directory yet")
        argv = proc.node_program("agent", f"--run-dir={self._run_dir.path}")
        argv.append(f"--place={int(value['place'])}")
        argv += [f"--head={','.join(f'{host}:{port}' for host, port in heads)}"]
        return [*argv, f"--lifeline-fd={self._lifeline[0]}"]

    def _environment(self) -> dict[str, str] | None:
        """Let the script import this torchmuster, where its folder holds nothing else."""
        if not self._importable:
            return None
        path = os.environ.get("PYTHONPATH")
        return {
            **os.environ,
            "PYTHONPATH": f"{path}{os.pathsep}{self._root}" if path else self._root,
        }

    def _watch(self, agent: proc.Child) -> None:
        """Wait for the agent's end, end what it left, send the record, then say so."""
        status: int | None = None
        while status is None:
            status = agent.wait(3600.0)
        _end_all()
        if self._record is not None:
            self._record.send_new(small_files=True)
        self._writer.send(frames.pack_json(Kind.ENDED, {"status": status}))

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            for fd in self._lifeline:
                os.close(fd)
            self._lifeline = None

    def _collect(self) -> None:
        """Send what the run has made in the copied code folder; the folder goes when all of it came."""
        if self._record is not None:
            self._record.send_new(small_files=True)
        said: dict[str, Any] = {"count": 0, "stay": [], "num_stay": 0, "root": ""}
        if self._code is None:
            self._writer.send(frames.pack(Kind.OUTPUT))
        else:
            with contextlib.suppress(OSError):
                said = self._code.send(self._writer)
        snapshots = self._run_dir.snapshots if self._own_run_dir and self._run_dir else ""
        said["snapshots"] = snapshots if snapshots and os.path.isdir(snapshots) else ""
        self._writer.send(frames.pack_json(Kind.COLLECTED, said))

    # Connections of the client to the coordinator.

    def _relay(self, kind: int, number: int, data: bytes) -> None:
        if kind == Kind.RELAY_OPEN:
            self._open_call(number)
            return
        call = self._calls.get(number)
        if call is None:
            return
        try:
            if kind == Kind.RELAY_DATA:
                call.sendall(data)
            else:
                del self._calls[number]
                call.shutdown(socket.SHUT_RDWR)
        except OSError:
            self._hang_up(number)

    def _open_call(self, number: int) -> None:
        try:
            call = socket.create_connection(("127.0.0.1", self._port), timeout=_CALL_S)
        except OSError:
            self._writer.send(frames.pack_relay(Kind.RELAY_CLOSE, number))
            return
        self._carry_call(number, call)

    def _carry_call(self, number: int, call: socket.socket) -> None:
        call.settimeout(_CALL_S)  # a coordinator that reads nothing must not stop the pings
        self._calls[number] = call
        reading = threading.Thread(target=self._read_call, args=(number, call), daemon=True)
        reading.start()

    def _read_call(self, number: int, call: socket.socket) -> None:
        while True:
            try:
                data = call.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                break
            if not data:
                break
            if not self._writer.send_bulk(frames.pack_relay(Kind.RELAY_DATA, number, data)):
                break
        self._hang_up(number)
        call.close()

    def _hang_up(self, number: int) -> None:
        if self._calls.pop(number, None) is not None:
            self._writer.send(frames.pack_relay(Kind.RELAY_CLOSE, number))

    # The end.

    def leave(self) -> None:
        """End the agent and all below it, and take the secret away."""
        self._cut_lifeline()
        if self._tasks is not None:
            self._tasks.leave()
        if self._watcher is not None:
            self._watcher.join(_GENTLE_S)
        _end_all()
        if self._record is not None:
            self._record.stop()
        if self._own_run_dir and self._run_dir is not None:
            # A later session of this run may have written a new one, which is not ours to remove.
            with contextlib.suppress(OSError):
                if os.stat(self._run_dir.secret).st_ino == self._secret_inode:
                    os.unlink(self._run_dir.secret)
        self._writer.drain(1.0)


def _end_all() -> None:
    deadline = time.monotonic() + _KILL_S
    while proc.end_children() and time.monotonic() < deadline:
        threading.Event().wait(0.01)


def _sees_run(run_dir: str, token: str) -> bool:
    return courier_files.sees(os.path.join(run_dir, courier_files.TOKEN_FILE), token)


def _has_mark(run_dir: str, mark: str | None) -> bool:
    """Say whether this is that very folder: an earlier session's own has the same path and token."""
    return courier_files.mark_of(RunDir(run_dir)) == (mark or "")


def _has_code(script: dict[str, Any] | None, cwd: str) -> bool:
    """Say whether this host has the client's script, or its folder when the program is no file."""
    if script is None:
        return os.path.isdir(cwd)
    return code_copy.identity(script["path"]) == script


def main(arguments: list[str]) -> None:
    """Serve one session."""
    parser = argparse.ArgumentParser(prog="courier")
    parser.add_argument("--root", required=True)
    parser.add_argument("--importable", action="store_true")
    parser.add_argument("--temporary", action="store_true")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    proc.become_subreaper()
    # Nothing that is started here may write between our frames, or read them.
    incoming, outgoing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    writer = FrameWriter(outgoing)
    writer.start()
    courier = RemoteEnd(FrameReader(incoming), writer, options.root, importable=options.importable)
    try:
        courier.serve()
    finally:
        courier.leave()
        if options.temporary:
            shutil.rmtree(options.root, ignore_errors=True)
    os._exit(0)
