"""Files that go from pod to pod, and between the first pod and its client: three programs.

`pod-record` sends a run's record from its first pod to a client until the run has ended. With
`--once` it sends only what there is now, with `--outputs` also the outputs of a group's tasks, with
`--kept` the copy of the first pod's record that is held here. A client that holds everything says
so before the pod ends.

`pod-keep` receives the code archive, or a copy of the first pod's record, into this pod. Both speak
the protocol of `launcher/net/replica.py`.

`pod-place` puts what a group needs into a pod's run directory: plan, code, and the outputs its
tasks read. The archive is in a Secret or comes on standard input. With `--check` nothing is read,
and the exit code is 3 if the archive is still needed. If a replaced first pod found no record, it
starts from scratch: what tasks left here for its predecessor is removed.
"""

import contextlib
import hashlib
import lzma
import os
import secrets
import shutil
import threading
from dataclasses import dataclass, field

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, muster_home
from torchmuster.core.model import codec
from torchmuster.kubernetes.node.order import (
    CODE_FILE,
    KEY_FILE,
    MOVED_FILE,
    NODES_FILE,
    WORKFLOW_FILE,
    PodOrder,
    read_order,
)
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.relay import SendsMessages
from torchmuster.launcher.net.remote_messages import FrameReader, FrameWriter
from torchmuster.launcher.net.replica import Copy, CopyScope, CopyState, Feed
from torchmuster.launcher.node.remote import files
from torchmuster.workflow.plan import GroupNodes

_EVERY_S = 0.2
_DRAIN_S = 30.0
_FIRST_S = 60.0
_SILENCE_S = 24 * 3600.0
_SLOW_S = 10.0
_TASKS_FOLDER = "tasks"
LACKS_CODE = 3  # the exit code of `pod-place --check`
_LIMIT_BYTES = 2 * (code_copy.MAX_CODE_BYTES + code_copy.MAX_OUTPUT_BYTES)


@dataclass(slots=True)
class PodSession:
    """A session on standard input and output; redirects other output to standard error."""

    reader: FrameReader = field(default_factory=lambda: FrameReader(os.dup(0)))
    writer: FrameWriter = field(default_factory=lambda: FrameWriter(os.dup(1)))

    def __post_init__(self) -> None:
        os.dup2(2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordWords:
    """The command line of `pod-record`: the file of the pod's order, and what to send."""

    order: str
    once: bool = False
    outputs: bool = False
    kept: bool = False


def scope_of(order: PodOrder) -> CopyScope:
    """Return which files of the first pod's folder are the record of an order."""
    return files.RUN_RECORD if order.group is None else files.scope_of_group(order.group)


def send_record(arguments: list[str]) -> int:
    """Send the record until the run ends or nobody reads it any more."""
    words = codec.from_arguments(RecordWords, arguments)
    session, known = PodSession(), CopyState()
    while isinstance(has := session.reader.read(_FIRST_S), messages.CopyHas) and not known.take(
        has
    ):
        continue
    if not isinstance(has, messages.CopyHas):
        return 0
    other_order = has.order  # another pod's order, whose record is on a volume that this pod sees
    order = (
        read_order(words.order) if other_order is None else codec.from_plain(PodOrder, other_order)
    )
    root = kept_folder(order) if words.kept else order.run_dir.path
    gone = threading.Event()
    threading.Thread(target=_wait_for_end, args=(session.reader, gone, order), daemon=True).start()
    writer = session.writer
    if not files.mark_of(root):
        writer.send(messages.CopyOf(mark=""))
    while not (mark := files.mark_of(root)) and not gone.is_set() and not words.once:
        gone.wait(_EVERY_S)  # the owner has not created it yet
    if mark:
        writer.send(messages.CopyOf(mark=mark))
    scope = kept_scope(order) if words.kept else scope_of(order)
    feed = Feed(root, scope, writer, known if known.mark == mark else None)
    threading.Thread(target=_say_if_slow, args=(feed, writer, gone), daemon=True).start()
    while not gone.is_set():
        has_ended = os.path.exists(order.ended)
        feed.look(is_over=has_ended)
        if has_ended or words.once:
            _say_end(order, feed, writer, is_over=has_ended, wanted=words.outputs)
            gone.wait(_DRAIN_S)  # the client hangs up when it has everything
            break
        gone.wait(_EVERY_S)
    return 0


def _say_end(
    order: PodOrder, feed: Feed, writer: FrameWriter, *, is_over: bool, wanted: bool
) -> None:
    """Send the outputs, if wanted or at the end, and announce that nothing follows."""
    stay: list[str] = []
    if is_over or wanted:
        is_run = order.group is None
        stay = (
            files.CodeOutputs(order.run_dir).send(writer)
            if is_run
            else _send_of_tasks(writer, order)
        )
    if is_over and order.group is None:
        _send_of_others(writer, order)
    end = messages.CopyEnd(
        num_stay=len(stay), stay=tuple(stay[:20]), is_over=is_over, unread=feed.unread_report()
    )
    writer.send(end)
    writer.drain(_DRAIN_S)


def _wait_for_end(reader: FrameReader, gone: threading.Event, order: PodOrder) -> None:
    """Wait until the client hangs up; note its message that it holds everything."""
    with contextlib.suppress(messages.FrameError, TimeoutError, OSError):
        while (message := reader.read(_SILENCE_S)) is not None:
            if isinstance(message, messages.CopyHeld):
                atomic.write_json(order.held, {})
    gone.set()


def _say_if_slow(feed: Feed, writer: FrameWriter, gone: threading.Event) -> None:
    """Report once that the disk does not answer."""
    while not gone.wait(1.0):
        # With a full queue the reader is slow, not the disk.
        if feed.busy.elapsed_s > _SLOW_S and writer.drain(0.0):
            why = f"the disk of its first pod has not answered for {_SLOW_S:.0f} s: the copy of the record waits for it"
            writer.send(messages.RemoteNote(text=why))
            return


# What tasks make, on its way to the first pod, and from there to the client.


def _send_of_tasks(session: SendsMessages, order: PodOrder) -> list[str]:
    """Send the outputs of a group's tasks, each completely or not at all; describe the rest.

    With a volume nothing has to travel.
    """
    if order.has_volume:
        return []
    run_dir = order.run_dir
    come: list[str] = []
    stay: list[str] = []
    room = code_copy.MAX_OUTPUT_BYTES
    for task in _tasks_with_output(order):
        names = output_names(run_dir, task)
        size = sum(os.lstat(os.path.join(run_dir.path, name)).st_size for name in names)
        if size > room:
            stay.append(f"the output of {task}")
            continue
        room -= size
        come += names
    files.send_outputs(session, run_dir.path, come)
    return stay


def _send_of_others(session: SendsMessages, order: PodOrder) -> None:
    """Send what the first pod has fetched from the others: new and changed files of their code."""
    top = os.path.join(order.run_dir.path, "output")
    for host in sorted(os.listdir(top)) if os.path.isdir(top) else ():
        root = os.path.join(top, host)
        files.send_outputs(session, root, _files_below(root, root), host)


def _tasks_with_output(order: PodOrder) -> list[str]:
    """Return the tasks of the group with outputs in this pod, made or gathered."""
    run_dir = order.run_dir
    noted = atomic.read_json(run_dir.group(order.group or "").nodes)
    names = codec.from_plain(GroupNodes, noted).tasks if noted is not None else {}
    return [name for name in names if os.path.isdir(run_dir.task_output(name))]


def take_outputs(run_dir: RunDir, came: str) -> None:
    """Move outputs that were unpacked into a separate folder to where tasks look for them."""
    folder = os.path.join(came, _TASKS_FOLDER)
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        source, target = os.path.join(folder, name, "output"), run_dir.task_output(name)
        if os.path.isdir(source) and not os.path.lexists(target):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.rename(source, target)


def output_names(run_dir: RunDir, task: str) -> list[str]:
    """Return the files of a task's output, as paths relative to the run directory."""
    return _files_below(run_dir.task_output(task), run_dir.path)


def _files_below(root: str, start: str) -> list[str]:
    return [
        os.path.relpath(os.path.join(folder, name), start)
        for folder, _, names in os.walk(root)
        for name in sorted(names)
    ]


# Files that a pod keeps.


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepWords:
    """The command line of `pod-keep`: the order's file, and whether the code archive comes."""

    order: str
    code: bool = False


def kept_scope(order: PodOrder) -> CopyScope:
    """Return what other pods copy: the record without its logs.

    The mark comes first, so that a copy is never mistaken for another run's; the events come last.
    """
    run_dir = order.run_dir
    if order.group is None:
        return CopyScope((files.MARK_FILE, RunDir.training, RunDir.events))
    events = os.path.relpath(run_dir.group(order.group).events, run_dir.path)
    return CopyScope((files.MARK_FILE, events))


def kept_folder(order: PodOrder) -> str:
    """Return where a pod keeps the copy of the first pod's record of this run."""
    name = ".".join(word for word in (order.run_id, order.group) if word is not None)
    return os.path.join(muster_home(), "records", name)


class KeptRecord:
    """A copy of the first pod's record on this pod's disk."""

    is_held = False

    def __init__(self, order: PodOrder) -> None:
        root = kept_folder(order)
        self.copy = Copy(root, kept_scope(order), files.mark_of(root), mode=0o600)
        self.note = f"{root}.keeper"

    def place(self) -> bool:
        """Say whether all that has come is in its place."""
        return self.copy.is_in_place and not self.copy.left_out


class ArrivingCode:
    """The archive of the code, on its way from the client into the first pod."""

    def __init__(self, order: PodOrder) -> None:
        self._order = order
        root = arriving_folder(order)
        self.copy = Copy(root, CopyScope((CODE_FILE,)), order.code_sha, mode=0o600)
        there = [order.archive, *([order.kept] if order.kept is not None else [])]
        self.is_held = os.path.exists(order.stamps) or any(map(self._is_long, there))
        self.note = os.path.join(root, "keeper")

    def place(self) -> bool:
        """Move the archive to its place, if it is complete and intact."""
        came = os.path.join(self.copy.root, CODE_FILE)
        if not self._is_long(came):
            return False
        with open(came, "rb") as file:
            is_whole = hashlib.file_digest(file, "sha256").hexdigest() == self._order.code_sha
        if is_whole:
            os.replace(came, self._order.archive)
        _forget(self.copy)  # the next archive starts from its beginning
        return is_whole

    def _is_long(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            return os.path.getsize(path) == self._order.code_bytes
        return False


def arriving_folder(order: PodOrder) -> str:
    """Return the folder in which the archive arrives."""
    return os.path.join(order.folder, f"arriving-{(order.code_sha or '')[:16]}")


def keep_files(arguments: list[str]) -> int:
    """Receive files until the other side hangs up."""
    words = codec.from_arguments(KeepWords, arguments)
    session, order = PodSession(), read_order(words.order)
    kept = ArrivingCode(order) if words.code else KeptRecord(order)
    if kept.is_held:
        session.writer.send(messages.CopyHeld())
        session.writer.drain(_DRAIN_S)
        return 0
    try:
        return _keep(session, kept)
    except OSError as error:
        what, why = "what comes can't be written in the pod", error.strerror or str(error)
        session.writer.send(messages.RemoteFailed(what=what, where=kept.copy.root, why=why))
        session.writer.drain(_DRAIN_S)
        return 1


def _keep(session: PodSession, kept: KeptRecord | ArrivingCode) -> int:
    """Receive files; return 0 at the end, 1 if another keeper took over or the files are not whole.

    Raises:
        OSError: They can't be written.
    """
    os.makedirs(kept.copy.root, mode=0o700, exist_ok=True)
    mine = secrets.token_hex(8)  # an earlier keeper may only have been suspended
    files.write_private(kept.note, mine)
    for has in kept.copy.has():
        session.writer.send(has)
    while (message := _next(session)) is not None:
        if not isinstance(message, messages.CopyOf) and files.read_private(kept.note) != mine:
            return 1
        match message:
            case messages.CopyOf(mark=mark) if not kept.copy.begin(mark):
                _forget(kept.copy)  # of another folder
                os.makedirs(kept.copy.root, mode=0o700)
            case messages.FilePiece() if not kept.copy.take(message):
                raise kept.copy.trouble or OSError("a piece is missing")
            case messages.CopyEnd():
                if not kept.place():
                    return 1
                session.writer.send(messages.CopyHeld())
    return 0


def _next(session: PodSession) -> messages.RemoteMessage | None:
    """Return the next message; None if the other side is gone or sends something else."""
    with contextlib.suppress(messages.FrameError, OSError):
        return session.reader.read(_SILENCE_S)
    return None


def _forget(copy: Copy) -> None:
    shutil.rmtree(copy.root, ignore_errors=True)


# What a group needs in a pod.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceWords:
    """The command line of `pod-place`: order file, the head's mark, and whether to check only."""

    order: str
    head: str
    check: bool = False


def place_group(arguments: list[str]) -> int:
    """Put the archive and the plan into place."""
    words = codec.from_arguments(PlaceWords, arguments)
    order = read_order(words.order)
    if _placed_by(order) == words.head:
        return 0
    came = os.path.join(os.path.dirname(words.order), CODE_FILE)
    is_brought = os.path.exists(came)
    if words.check and not is_brought:
        return LACKS_CODE
    shutil.rmtree(order.run_dir.path, ignore_errors=True)
    os.makedirs(order.folder, mode=0o700, exist_ok=True)
    part = f"{order.archive}.{os.getpid()}"
    with open(part, "wb") as file, open(came if is_brought else 0, "rb") as source:
        shutil.copyfileobj(source, file, 1 << 20)
    os.replace(part, order.archive)
    place(order, os.path.dirname(words.order), words.head)
    return 0


def _placed_by(order: PodOrder) -> str:
    """Return the mark of the head for which the files were placed; empty if they weren't."""
    noted = atomic.read_json(order.stamps)
    return str(noted.get("head")) if isinstance(noted, dict) else ""


def place(order: PodOrder, brought: str, head: str | None = None) -> None:
    """Unpack the archive; `head` is the mark of the head's folder, None for this pod's own.

    Raises:
        OSError: There is no room.
        ValueError: The archive is damaged.
    """
    run_dir = order.run_dir
    os.makedirs(os.path.join(run_dir.path, "logs", "agents"), mode=0o700, exist_ok=True)
    came = os.path.join(order.folder, "came")
    shutil.rmtree(came, ignore_errors=True)
    os.makedirs(came)
    with open(order.archive, "rb") as file:
        code_copy.read_archive(file, came, _LIMIT_BYTES)
    take_outputs(run_dir, came)
    shutil.rmtree(os.path.join(came, _TASKS_FOLDER), ignore_errors=True)
    with lzma.open(os.path.join(brought, MOVED_FILE)) as packed:
        atomic.replace_file(os.path.join(came, WORKFLOW_FILE), packed.read(_LIMIT_BYTES))
    nodes = run_dir.group(order.group or "").nodes
    shutil.copyfile(os.path.join(brought, NODES_FILE), nodes)
    # The plan and the code; on a volume an earlier group may have put them there.
    for name in os.listdir(came):
        target = os.path.join(run_dir.path, name)
        if os.path.isdir(target):
            shutil.rmtree(os.path.join(came, name))
        else:
            os.replace(os.path.join(came, name), target)
    shutil.rmtree(came, ignore_errors=True)
    with open(os.path.join(brought, KEY_FILE)) as file:
        atomic.replace_file(run_dir.secret, file.read().encode(), mode=0o600)
    files.make_mark(run_dir.path)
    os.makedirs(order.folder, exist_ok=True)
    atomic.write_json(order.stamps, {"head": head or files.mark_of(run_dir.path)})
