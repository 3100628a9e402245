"""The client's copy of a run in pods: record and logs come from the first pod as they grow.

All views then work as for any run. A broken connection is made again, and the copy resumes. If the
user may not connect to pods, the first pod's log and its last message give what they can.
"""

import contextlib
import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.verdict import Report, Result
from torchmuster.core.owner.create import failed_before_start
from torchmuster.errors import MusterError
from torchmuster.kubernetes.engine.answers import CONTAINER, Pod
from torchmuster.kubernetes.engine.dialect import kubectl_for
from torchmuster.kubernetes.node import order as orders
from torchmuster.kubernetes.node.order import NUM_FILES_KEY, VALUES_KEY
from torchmuster.kubernetes.node.record import scope_of, take_outputs
from torchmuster.kubernetes.pods import reach
from torchmuster.kubernetes.pods.losses import explain_group_loss, explain_loss
from torchmuster.kubernetes.pods.pull import BROKEN, Pull, Push, program
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.engines.ssh_files import CLIENT_ONLY_FILES, own_paths
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.replica import Copy, CopyScope
from torchmuster.launcher.node.remote.files import ReturnedOutputs
from torchmuster.workflow.record import GroupOutcome

_AGAIN_S = (0.3, 1.0, 2.0, 5.0)
_STATE_FILE = "pods/mirror.json"
_LATE_S = 5.0
_SLOW_S = 10.0
_SAY_FAILURES = 4
_REACH_AGAIN_S = 30.0  # a revoked right may return
_LOOK_S = 60.0  # without news: a watch that reconnects begins with all pods, so no change is missed


class _CopyError(EngineError):
    """The connection works, but files can't be written here."""


@dataclass(slots=True)
class RecordMirror:
    """Copies the record of a run here until the run has ended.

    Attributes:
        show: Gets the lines of the first pod's log if nothing else is available.
        takes: This client is the one the first pod waits for: tell the pod when everything has
            come.
        reader: A Job whose only pod sends what the run left on its volume; None for the first pod.
        is_finishing: Everything has come and is being put into place.
        is_complete: Everything is in place.
        holds_all: Nothing is left that only the pod has.
        lacks_right: The line that the user's Role lacks for connections to pods.
    """

    run: reach.RunInPods
    watch: reach.PodWatch
    say: Callable[[str], None]
    show: Callable[[str], None] = lambda _: None
    takes: bool = False
    reader: str | None = None
    is_complete: bool = False
    holds_all: bool = False
    is_connected: bool = False
    is_finishing: bool = False
    lacks_right: str | None = None
    is_up: bool = False
    _since: float = 0.0
    _stopping: threading.Event = field(default_factory=threading.Event)
    _child: proc.Child | None = None
    _way: Pull | Push | None = None
    _copy: Copy | None = None
    _said: set[str] = field(default_factory=set)
    _port: int | None = None
    _uid: str = ""
    _looked: int = 0
    _result: bytes = b""
    _shown: dict[str, int] = field(default_factory=dict)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start copying in a thread."""
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop copying and keep what has come."""
        self._stopping.set()
        if self._child is not None:
            self._child.send_signal(15)
        if self._way is not None:
            self._way.stop()
        self.watch.wake()
        if self._thread is not None:
            self._thread.join(_LATE_S)

    def catch_up(self) -> None:
        """Copy what there is now.

        Raises:
            EngineError: The first pod can't be reached.
        """
        self._follow(once=True)

    def _work(self) -> None:
        failures = 0
        while not self._stopping.is_set() and not self.is_complete:
            seen = self.watch.number
            try:
                if not self._follow():
                    # `stop` sets its flag before it wakes the watch: no wake-up is missed.
                    if not self._stopping.is_set():
                        self.watch.wait(seen, _LOOK_S)
                    continue
                failures = 0
                self.lacks_right = None
            except reach.NotAllowedError as error:
                self._fall_back(error)
                continue
            except _CopyError as error:
                failures = max(failures + 1, _SAY_FAILURES)
                self._say_once(f"{error.what}; it is tried again")
            except BROKEN as error:
                failures += 1  # if the pod is gone, the follower's next look reports it
                if failures == _SAY_FAILURES:
                    why = error.what if isinstance(error, MusterError) else str(error)
                    self.say(f"the first pod can't be reached: {why}; it is tried again")
            self.is_connected = False
            self._stopping.wait(_AGAIN_S[min(failures, len(_AGAIN_S) - 1)])

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    @property
    def is_settled(self) -> bool:
        """Say whether the connection has lasted long enough for the record to be up to date."""
        return self.is_connected and time.monotonic() > self._since + _LATE_S

    def look(self) -> None:
        """Break the connection to a replaced first pod: a dead node's does not break by itself.

        Raises:
            EngineError: The cluster can't be queried.
        """
        busy_s = self._copy.busy.elapsed_s if self._copy is not None else 0.0
        slow = f"{self.run.run_dir.path}: the disk does not answer: the copy of the record waits for it"
        if busy_s > _SLOW_S:
            self._say_once(slow)
        number, before = self.watch.number, self._looked
        self._looked = number
        if self._way is None or number == before:
            return
        pod = self.run.first_pod()
        if pod is not None and pod.uid != self._uid:
            self._way.stop()

    def _follow(self, *, once: bool = False) -> bool:
        """Copy until the connection breaks; return False if the pod does not run."""
        pod = self.run.first_pod() if self.reader is None else reach.find_pod(self.reader, 0)
        if pod is None or not pod.is_up:
            return False
        self._uid, self.is_up = pod.uid, True
        with reach.forward(self.run.job_id, pod.name, self.run.order.port) as way:
            if self.run.order.code_bytes is not None and self.reader is None:
                self._send_code(way.port)
            self._port = way.port
            try:
                self._read_record(way.port, once=once)
            finally:
                self._port = None
        return True

    def note_no_room(self, reason: str) -> None:
        """Tell the connected first pod that others have no room on the cluster, so that it waits.

        Raises:
            MusterError: The command can't be started.
        """
        if (port := self._port) is not None:
            path = shlex.quote(self.run.order.no_room)
            argv = self.run.argv(port, f"cat >{path}.part && mv {path}.part {path}")
            proc.ask(argv, reason.encode(), _LATE_S)

    def _send_code(self, port: int) -> None:
        """Send the code, unless the pod has it: from this run, or from one on the volume."""
        at_once = threading.Event()
        at_once.set()
        self._way = push = Push(self.run.argv(port, program("pod-keep --code")))
        folder, sha = os.path.join(self.run.folder, "pods"), self.run.order.code_sha or ""
        push.run(folder, CopyScope((orders.CODE_FILE,)), sha, at_once)

    def _read_record(self, port: int, *, once: bool) -> None:
        came, copy = ReturnedOutputs(self.run.run_dir), self._copy_here()
        self._way = pull = Pull(self.run.argv(port, program("pod-record" + " --once" * once)))
        self._copy = copy
        try:
            pull.run(
                self._has(copy),
                lambda message: self._take(message, copy, came),
                lambda: self.is_complete and self.takes and self.holds_all,
            )
        except OSError:
            if copy.trouble is None:
                raise
            why = f"{self.run.run_dir.path}: the record can't be written here: {copy.trouble.strerror}"
            raise _CopyError(why) from None

    def _copy_here(self) -> Copy:
        noted = atomic.read_json(os.path.join(self.run.folder, _STATE_FILE))
        mark = str(noted.get("mark", "")) if isinstance(noted, dict) else ""
        scope = scope_of(self.run.order)
        scope = replace(scope, never=scope.never | CLIENT_ONLY_FILES)
        return Copy(self.run.run_dir.path, scope, mark)

    def _has(self, copy: Copy) -> "Iterator[messages.CopyHas]":
        """Yield how far the copy is; for a reading pod, add the order that names the record."""
        order = codec.to_plain(self.run.order) if self.reader is not None else None
        for part in copy.has():
            yield replace(part, order=order)

    def _take(self, message: messages.RemoteMessage, copy: Copy, came: ReturnedOutputs) -> bool:
        if not self.is_connected:
            self.is_connected, self._since = True, time.monotonic()
        match message:
            case messages.CopyOf(mark=mark):
                if mark:
                    self._take_mark(mark, copy)
            case messages.FilePiece(path=path) if path == os.path.relpath(
                self.run.result, self.run.run_dir.path
            ):
                self._result = self._result[: message.offset] + message.data
            case messages.FilePiece(path=path) if (host := self._host_of(path)) is not None:
                came.take(message, host)
            case messages.FilePiece(path=path) if copy.scope.has(path):
                copy.put(message)
            case messages.FilePiece():
                return True  # only a client writes this here
            case messages.RemoteNote(text=text):
                self.say(text)
            case messages.CopyEnd():
                lacks = [
                    *message.unread,
                    *(f"{path}: {why}" for path, why in copy.left_out.items()),
                ]
                if message.is_over:
                    self.is_finishing = True
                    try:
                        self._finish(replace(message, unread=tuple(lacks[:20])), came)
                    finally:
                        self.is_finishing = False
                return False
            case _:
                raise messages.FrameError(f"{type(message).__name__} is not of a record")
        return True

    def _host_of(self, path: str) -> str | None:
        """Return which pod's outputs these are; None for other files."""
        prefix, _, host = path.rpartition("/")
        hosts = [self.run.order.host(index) for index in range(self.run.order.num_pods)]
        if path == messages.OUTPUT_FILE:
            return hosts[0]
        return host if prefix == messages.OUTPUT_FILE and host in hosts else None

    def _take_mark(self, mark: str, copy: Copy) -> None:
        known = copy.mark
        is_same = copy.begin(mark)
        if not known:
            self._forget_logs()
        elif not is_same:
            self._set_aside()
            self.say(
                "the first pod is another one, with an empty disk: what came of the run before is in"
                f" {self.run.folder}/earlier"
            )
        atomic.write_json(os.path.join(self.run.folder, _STATE_FILE), {"mark": mark})

    def _forget_logs(self) -> None:
        """Remove what came from pods' logs: pieces of the record would be written over it."""
        logs = os.path.join(self.run.run_dir.path, "logs", self.run.order.group or "")
        for folder, _, names in os.walk(logs):
            for name in names:
                os.unlink(os.path.join(folder, name))

    def _set_aside(self) -> None:
        """Set aside the copy of a record that ended with its pod."""
        base = os.path.join(self.run.folder, "earlier")
        os.makedirs(base, exist_ok=True)
        folder = os.path.join(base, str(len(os.listdir(base)) + 1))
        os.makedirs(folder)
        logs = os.path.join(self.run.run_dir.path, "logs", self.run.order.group or "")
        own = RunDir(self.run.folder)
        for path in (own.events, own.training, self.run.run_dir.losses, os.path.normpath(logs)):
            with contextlib.suppress(OSError):
                os.rename(path, os.path.join(folder, os.path.basename(path)))
        os.makedirs(self.run.run_dir.logs, exist_ok=True)

    def _finish(self, end: messages.CopyEnd, outputs: ReturnedOutputs) -> None:
        if self.run.order.group is None:
            top = os.path.join(self.run.run_dir.path, "output")
            hosts = [self.run.order.host(index) for index in range(self.run.order.num_pods)]
            counts = {host: outputs.unpack(host, os.path.join(top, host)) for host in hosts}
            made_by = [host for host, count in counts.items() if count]
            if count := sum(counts.values()):
                where = os.path.join(top, made_by[0]) if len(made_by) == 1 else top
                self.say(
                    f"{count} new or changed file{'s' if count != 1 else ''} came back to {where}"
                )
        else:
            came = os.path.join(self.run.folder, "came")
            outputs.unpack(self.run.order.host(0), came)
            take_outputs(self.run.run_dir, came)
        if end.num_stay:
            self.say(
                f"{end.num_stay} files were too large to come back, and go with the pods: {', '.join(end.stay[:3])}"
            )
        self.holds_all = not end.unread
        if end.unread:
            self.say(f"files of the run are not here: {', '.join(end.unread[:4])}")
        else:
            path = os.path.join(self.run.folder, _STATE_FILE)
            atomic.write_json(path, {**(atomic.read_json(path) or {}), "complete": self.run.job_id})
        if self._result:
            plain = json.loads(self._result)
            theirs, ours = self.run.order.run_dir.path, self.run.run_dir.path
            own = own_paths(plain, theirs, ours, self.run.order.code_root or None)
            atomic.write_json(self.run.result, self._joined(own))
        self.is_complete = True

    def _joined(self, plain: "dict[str, object]") -> object:
        """Add to the result of a run or group what only the cluster knows."""
        if self.run.order.group is not None:
            outcome = codec.from_plain(GroupOutcome, plain)
            with_reason = explain_group_loss(outcome, self.run)
            return codec.to_plain(with_reason)
        if self.run.order.is_sweep:  # its owner is in its only pod
            return plain
        result = codec.from_plain(Result, plain)
        return codec.to_plain(explain_loss(result, self.run))

    # Without the right to connect to a pod.

    def _fall_back(self, error: MusterError) -> None:
        """Show the first pod's log for a while; the right may return."""
        if self.lacks_right is None:
            hint = f" ({error.fix})" if error.fix else ""
            self.say(f"pods can't be reached from here, so their logs are followed instead{hint}")
        self.lacks_right = error.fix or error.what
        until = time.monotonic() + _REACH_AGAIN_S
        while not self._stopping.is_set() and time.monotonic() < until:
            seen = self.watch.number
            with contextlib.suppress(MusterError):
                pod = self.run.first_pod()
                if pod is not None and (pod.is_running or pod.end is not None):
                    self._follow_log(pod.name, until)
                    if pod.end is not None:
                        self._stopping.set()
            if not self._stopping.is_set():
                self.watch.wait(seen, max(0.0, until - time.monotonic()))

    def _follow_log(self, pod: str, until: float) -> None:
        """Show a pod's log until a moment, continuing where the last call ended."""
        words = ("logs", f"pod/{pod}", f"--container={CONTAINER}", "--follow")
        command = reach.LastingCommand.start(
            kubectl_for(self.run.job_id, *words), hears_errors=False
        )
        child = self._child = command.child
        ending = threading.Timer(max(0.0, until - time.monotonic()), child.send_signal, (15,))
        ending.start()
        with (
            contextlib.closing(command),
            open(command.out, errors="replace", closefd=False) as lines,
            open(os.path.join(self.run.folder, "job.log"), "a") as log,
        ):
            for number, line in enumerate(lines):
                is_part = not line.endswith("\n") and time.monotonic() >= until
                if number < self._shown.get(pod, 0) or is_part:
                    continue
                self._shown[pod] = number + 1
                log.write(line)
                log.flush()
                self.show(line)
        ending.cancel()
        child.wait(_LATE_S)


def holds_record(folder: str, job_id: str) -> bool:
    """Say whether a job's whole record and its files have come to its folder here."""
    noted = atomic.read_json(os.path.join(folder, _STATE_FILE))
    return isinstance(noted, dict) and noted.get("complete") == job_id


def result_of_pod(pod: Pod | None, run_dir: RunDir) -> Result | None:
    """Return the result in the first pod's last message; None if there is none."""
    if pod is None or pod.end is None:
        return None
    try:
        plain = json.loads(pod.end.last_message)
        if "error" in plain:  # from `kubernetes/node/start.py`, before there was a run
            report = Report(
                error=str(plain["error"]),
                at=f"pod {pod.name} on {pod.node}",
                because=(str(plain.get("because")),),
                hint=str(plain.get("hint")),
            )
            return failed_before_start(run_dir, EngineError.exit_code, report)
        for key in (NUM_FILES_KEY, VALUES_KEY):
            plain.pop(key, None)
        return codec.from_plain(Result, plain)
    except (codec.CodecError, ValueError, TypeError):
        return None


def forget_copy(run_dir: RunDir) -> None:
    """Make the next copy start from scratch: a log from the pod differs from the record's."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(run_dir.path, _STATE_FILE))


def files_left_in(pod: Pod) -> int:
    """Return how many files of a sweep member went with its pod, if nobody copied them before."""
    with contextlib.suppress(ValueError, TypeError):
        return int(_left_by(pod, NUM_FILES_KEY))
    return 0


def values_left_by(pod: Pod) -> object:
    """Return the event with the newest values that a sweep member recorded; None for none."""
    return _left_by(pod, VALUES_KEY)


def _left_by(pod: Pod, key: str) -> Any:
    with contextlib.suppress(ValueError, AttributeError):
        return json.loads(pod.end.last_message if pod.end else "{}").get(key)
    return None
