"""The client's copy of a run in pods: its record and logs come through the first pod's door, as they grow.

All views then work as for any run. The way breaks and is made again, from where the copy ends. Where it is not allowed, the log
of the first pod and its last message tell what can be told.
"""

import contextlib
import json
import os
import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmuster import proc
from torchmuster.engines.base import EngineError
from torchmuster.engines.kubernetes.answers import CONTAINER, Pod
from torchmuster.engines.kubernetes.dialect import kubectl, place_of
from torchmuster.engines.ssh_files import FilesBack, own_paths
from torchmuster.errors import MusterError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.outcome import GroupOutcome
from torchmuster.model.verdict import Report, Result
from torchmuster.net import remote_messages as messages
from torchmuster.node.pod import order as orders
from torchmuster.node.pod.call import call_argv
from torchmuster.node.pod.order import ORDER_VARIABLE, PROGRAMS_VARIABLE, PodOrder
from torchmuster.node.pod.outputs import take_outputs
from torchmuster.owner.jobs.jobs import failed_before_start
from torchmuster.owner.pods.losses import explain_group_loss, explain_loss
from torchmuster.owner.pods.pull import RecordPull
from torchmuster.owner.pods.reach import NotAllowedError, find_pod, forward
from torchmuster.owner.pods.sweep.member_copies import MemberCopies, is_of_member
from torchmuster.owner.pods.watch import PodWatch

_AGAIN_S = (0.3, 1.0, 2.0, 5.0)
_SILENCE_S = 60.0
# Which Jobs are asked for and removed, and what a workflow goes on with, is the client's alone.
_ACTED_UPON = frozenset(
    {
        "job.json",
        "jobs.json",
        "job.sh",
        "links.json",
        "site.json",
        "workflow.json",
        "cancelled.json",
        "losses.json",
    }
)
_FROM = "pod"  # where the pieces come from, for `FilesBack`
_STATE_FILE = "pods/mirror.json"
_PIECE_BYTES = 1 << 16
_LATE_S = 5.0
_LOOK_S = 60.0  # without news: a watch that breaks begins with all pods, so none are missed


@dataclass(slots=True)
class RecordMirror:
    """Copies the record of a run here until it has ended.

    Attributes:
        show: Gets lines of the first pod's log, where that is all there is.
        is_finishing: All has come, and is put where it belongs.
        lacks_right: What the user's Role lacks, where pods may not be reached.
    """

    run_dir: RunDir
    order: PodOrder
    job_id: str
    watch: PodWatch
    say: Callable[[str], None]
    show: Callable[[str], None] = lambda _: None
    is_complete: bool = False
    is_connected: bool = False
    is_finishing: bool = False
    lacks_right: str | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)
    _child: proc.Child | None = None
    _pull: RecordPull | None = None
    _port: int | None = None
    _result: bytes = b""
    _shown: dict[str, int] = field(default_factory=dict)
    _members: MemberCopies | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, in a thread."""
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, with what there is."""
        self._stopping.set()
        if self._child is not None:
            self._child.send_signal(15)
        if self._pull is not None:
            self._pull.stop()
        self.watch.wake()
        if self._thread is not None:
            self._thread.join(_LATE_S)

    def catch_up(self) -> None:
        """Copy what there is now.

        Raises:
            EngineError: The first pod can't be reached.
        """
        self._copy(once=True)

    def _work(self) -> None:
        failures = 0
        while not self._stopping.is_set() and not self.is_complete:
            seen = self.watch.number
            try:
                if not self._copy():
                    self._wait(seen)
                    continue
                failures = 0
            except NotAllowedError as error:
                self._fall_back(error)
                return
            except (
                MusterError,
                OSError,
            ):  # the next look of the follower tells why the pod is not there
                failures += 1
            self.is_connected = False
            self._stopping.wait(_AGAIN_S[min(failures, len(_AGAIN_S) - 1)])

    def _wait(self, seen: int) -> None:
        """Wait for news; `stop` wakes the watch, and has said so before, for who looked at the number only afterwards."""
        if not self._stopping.is_set():
            self.watch.wait(seen, _LOOK_S)

    def _copy(self, *, once: bool = False) -> bool:
        """Copy until the way breaks; say whether the first pod runs."""
        pod = find_pod(self.job_id, 0)
        if pod is None or not pod.is_up:
            return False
        with forward(self.job_id, pod.name, self.order.port) as way:
            if self.order.code_bytes is not None:
                self._send_code(way.port)
            self._port = way.port
            try:
                self._read_record(way.port, once=once)
            finally:
                self._port = None
        return True

    def note_no_room(self, reason: str) -> None:
        """Tell the first pod that others have no room on the cluster, by the way that there is: it waits on.

        Raises:
            MusterError: The command can't be started.
        """
        if (port := self._port) is not None:
            path = shlex.quote(self.order.no_room)
            proc.ask(
                self._argv(port, f"cat >{path}.part && mv {path}.part {path}"),
                reason.encode(),
                _LATE_S,
            )

    def _argv(self, port: int, command: str) -> list[str]:
        return [*call_argv(self.run_dir.secret, port), "127.0.0.1", command]

    def _send_code(self, port: int) -> None:
        """Send the code, unless the pod has it: of this run, or on a volume from one before."""
        path, folder = self.order.archive, self.order.folder
        size = self.order.code_bytes
        places = [path, self.order.kept] if self.order.kept is not None else [path]
        there = [f'[ "$(wc -c 2>/dev/null <"{place}")" = {size} ]' for place in places]
        asked_for = " || ".join((f'[ -f "{self.order.stamps}" ]', *there))
        asked = proc.ask(self._argv(port, asked_for), b"", _SILENCE_S)
        if asked.status == 0:
            return
        command = f'mkdir -p "{folder}" && cat >"{path}.part" && mv "{path}.part" "{path}"'
        archive = os.path.join(self.folder, "pods", orders.CODE_FILE)
        with open(archive, "rb") as file, open(os.devnull, "wb") as null:
            words = self._argv(port, command)
            child = proc.start(words, stdin=file.fileno(), stderr=null.fileno())
            self._child = child
            while child.wait(1.0) is None and not self._stopping.is_set():
                continue

    def _read_record(self, port: int, *, once: bool) -> None:
        if self.order.is_sweep:
            self._members = MemberCopies(self.run_dir, self.order)
        known = self._known()
        command = (
            f"exec ${PROGRAMS_VARIABLE} pod-record --order ${ORDER_VARIABLE}" + " --once" * once
        )
        files = FilesBack(self.run_dir)
        self._pull = RecordPull(self._argv(port, command))
        self._pull.run(known, lambda message: self._take(message, files, str(known["mark"])))

    def _known(self) -> "dict[str, object]":
        """Return which record the copy is of, and how much there is of each file."""
        noted = atomic.read_json(os.path.join(self.folder, _STATE_FILE))
        mark = str(noted.get("mark", "")) if isinstance(noted, dict) else ""
        sizes: dict[str, int] = {}
        for path in self._own_files():
            _note_size(self.run_dir, path, sizes)
        for folder, _, names in os.walk(os.path.join(self.run_dir.path, "logs")):
            for name in names:
                _note_size(self.run_dir, os.path.join(folder, name), sizes)
        for path in self._members.whole() if self._members is not None else ():
            _note_size(self.run_dir, path, sizes)
        return {"mark": mark, "sizes": sizes}

    @property
    def folder(self) -> str:
        """Return the folder here of what is this record's alone."""
        group = self.order.group
        return self.run_dir.path if group is None else self.run_dir.group(group).path

    def _own_files(self) -> tuple[str, ...]:
        """Return the files and folders of this record beside the logs."""
        group = self.order.group
        if group is not None:
            return (self.run_dir.group(group).events,)
        return (self.run_dir.events, self.run_dir.training)

    def _take(self, message: messages.RemoteMessage, files: FilesBack, known: str) -> bool:
        self.is_connected = True
        match message:
            case messages.RecordOf(mark=mark):
                self._take_mark(mark, known)
            case messages.FilePiece(path=path, data=data) if path == self._result_name:
                self._result = data
            case messages.FilePiece(path=path) if self._members is not None and is_of_member(path):
                self._members.take(message)
            case messages.FilePiece(path=path) if self._may_write(path):
                files.take(message, _FROM)
            case messages.FilePiece():
                return True
            case messages.RecordEnd():
                self._finish(message, files)
                return False
            case _:
                raise messages.FrameError(f"{type(message).__name__} is not of a record")
        return True

    def _may_write(self, path: str) -> bool:
        """Say whether a pod may write this file here: nothing that this client acts upon."""
        if path.startswith("logs/") or path == messages.OUTPUT_FILE:
            return True
        if self.order.group is not None:
            return path == os.path.relpath(self._own_files()[0], self.run_dir.path)
        return "/" not in path and path not in _ACTED_UPON

    @property
    def _result_name(self) -> str:
        return os.path.relpath(self._result_path, self.run_dir.path)

    @property
    def _result_path(self) -> str:
        group = self.order.group
        return self.run_dir.result if group is None else self.run_dir.group(group).result

    def _take_mark(self, mark: str, known: str) -> None:
        if known and mark != known:
            self._set_aside()
            self.say(
                "the first pod is another one, with an empty disk: what came of the run before is in"
                f" {self.folder}/earlier"
            )
        atomic.write_json(os.path.join(self.folder, _STATE_FILE), {"mark": mark})

    def _set_aside(self) -> None:
        """Keep the copy of a record that has ended with its pod."""
        base = os.path.join(self.folder, "earlier")
        os.makedirs(base, exist_ok=True)
        folder = os.path.join(base, str(len(os.listdir(base)) + 1))
        os.makedirs(folder)
        logs = os.path.join(self.run_dir.path, "logs", self.order.group or "")
        members = (self.run_dir.members,) if self.order.is_sweep else ()
        for path in (*self._own_files(), self.run_dir.losses, *members, os.path.normpath(logs)):
            with contextlib.suppress(OSError):
                os.rename(path, os.path.join(folder, os.path.basename(path)))
        os.makedirs(self.run_dir.logs, exist_ok=True)
        for folder in members:
            os.makedirs(folder, mode=0o700, exist_ok=True)

    def _finish(self, end: messages.RecordEnd, files: FilesBack) -> None:
        if not end.is_over:
            return
        self.is_finishing = True
        try:
            self._place(end, files)
        finally:
            self.is_finishing = False

    def _place(self, end: messages.RecordEnd, files: FilesBack) -> None:
        if self.order.group is None:
            where = os.path.join(self.run_dir.path, "output", self.order.host(0))
            if count := files.unpack(_FROM, where):
                self.say(
                    f"{count} new or changed file{'s' if count != 1 else ''} came back to {where}"
                )
        else:
            came = os.path.join(self.folder, "came")
            files.unpack(_FROM, came)
            take_outputs(self.run_dir, came)
        if end.num_stay:
            self.say(
                f"{end.num_stay} files were too large to come back, and go with the pods: {', '.join(end.stay[:3])}"
            )
        path = os.path.join(self.folder, _STATE_FILE)
        atomic.write_json(path, {**(atomic.read_json(path) or {}), "complete": self.job_id})
        if self._result:
            plain = json.loads(self._result)
            theirs, ours = self.order.run_dir.path, self.run_dir.path
            own = own_paths(plain, theirs, ours, self.order.code_root or None)
            atomic.write_json(self._result_path, self._joined(own))
        self.is_complete = True

    def _joined(self, plain: "dict[str, object]") -> object:
        """Return the result of a run, or of a group, with what only the cluster knows."""
        if self.order.group is not None:
            outcome = codec.from_plain(GroupOutcome, plain)
            told = explain_group_loss(outcome, self.run_dir, self.order, self.job_id)
            return codec.to_plain(told)
        result = codec.from_plain(Result, plain)
        return codec.to_plain(explain_loss(result, self.run_dir, self.order, self.job_id))

    # Without the right to reach a pod.

    def _fall_back(self, error: MusterError) -> None:
        """Follow the log of the first pod instead."""
        self.lacks_right = error.fix
        hint = f" ({error.fix})" if error.fix else ""
        self.say(f"pods can't be reached from here, so their logs are followed instead{hint}")
        context, namespace, _ = place_of(self.job_id)
        while not self._stopping.is_set():
            seen = self.watch.number
            with contextlib.suppress(MusterError):
                pod = find_pod(self.job_id, 0)
                if pod is not None and (pod.is_running or pod.end is not None):
                    ours = f"--container={CONTAINER}"
                    argv = kubectl(context, namespace, "logs", f"pod/{pod.name}", ours, "--follow")
                    words = [word for word in argv if "timeout" not in word]
                    self._follow_log(words, pod.name)
                    if pod.end is not None:
                        return
            self._wait(seen)

    def _follow_log(self, argv: list[str], pod: str) -> None:
        """Show what a pod writes, from where that ended the last time."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            words = proc.node_program("leashed", *argv)
            self._child = proc.start(words, stdout=writing, stderr=null)
        finally:
            os.close(writing)
            os.close(null)
        with (
            open(reading, errors="replace") as lines,
            open(os.path.join(self.folder, "job.log"), "a") as log,
        ):
            for number, line in enumerate(lines):
                if number < self._shown.get(pod, 0):
                    continue
                self._shown[pod] = number + 1
                log.write(line)
                log.flush()
                self.show(line)
        self._child.wait(_LATE_S)


def holds_record(run_dir: RunDir, job_id: str) -> bool:
    """Say whether all of the record of a run's job has come here, and the files that it has left."""
    noted = atomic.read_json(os.path.join(run_dir.path, _STATE_FILE))
    return isinstance(noted, dict) and noted.get("complete") == job_id


def result_of_pod(pod: Pod | None, run_dir: RunDir) -> Result | None:
    """Return what the first pod left as its last message; None where there is nothing."""
    if pod is None or pod.end is None:
        return None
    try:
        plain = json.loads(pod.end.last_message)
        if "error" in plain:  # of `node/pod/start.py`, before there was a run
            report = Report(
                error=str(plain["error"]),
                at=f"pod {pod.name} on {pod.node}",
                because=(str(plain.get("because")),),
                hint=str(plain.get("hint")),
            )
            return failed_before_start(run_dir, EngineError.exit_code, report)
        return codec.from_plain(Result, plain)
    except (codec.CodecError, ValueError, TypeError):
        return None


def _note_size(run_dir: RunDir, path: str, sizes: dict[str, int]) -> None:
    with contextlib.suppress(OSError):
        sizes[os.path.relpath(path, run_dir.path)] = os.path.getsize(path)
