"""A slot of a sweep in a pod: runs the members that the owner in the first pod names, one after the other, and sends their records.

    pod-slot

The owner starts it through the pod's door, and it ends with the connection. Members are started as those of a sweep on one machine
are (`owner/sweep/forks.py`, `owner/sweep/runs.py`), so a pod imports torch once for all of them.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import threading
from dataclasses import dataclass, field, replace

from torchmuster.errors import MusterError
from torchmuster.files import atomic, code_copy
from torchmuster.files.disk import DiskWriter
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Report
from torchmuster.net import remote_messages as messages
from torchmuster.net.frames import FrameReader, FrameWriter
from torchmuster.net.slot_messages import MemberEnded, SignalMember, SlotLeaves, StartMember
from torchmuster.node.pod import order as orders
from torchmuster.node.pod.order import AGAIN_CODE, ORDER_VARIABLE, PodOrder, own_index, read_order
from torchmuster.node.remote.files import CodeOutputs, RecordStream, write_piece
from torchmuster.owner.sweep.forks import ForkSlots
from torchmuster.owner.sweep.members import member_dir, prepare_member
from torchmuster.owner.sweep.runs import RunSlots
from torchmuster.owner.sweep.slots import MemberEnd, Slots
from torchmuster.spec.sweep_plan import SweepPlan

PING_EVERY_S = 5.0
SILENCE_S = 30.0
_FLUSH_S = 5.0
_LAST_WORDS_S = 5.0


def main(arguments: list[str]) -> int:
    """Be a slot until the owner hangs up, or this pod has to end."""
    argparse.ArgumentParser(prog="pod-slot").parse_args(arguments)
    path = os.environ[ORDER_VARIABLE]
    # Nothing that is started here may write between the messages.
    outgoing = FrameWriter(os.dup(1))
    os.dup2(2, 1)
    incoming = FrameReader(os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    order = read_order(path)
    try:
        plan = place_code(order, os.path.dirname(path), incoming, outgoing)
        code = asyncio.run(_Slot(order, plan, incoming, outgoing).serve())
    except MusterError as error:
        outgoing.send(
            messages.RemoteFailed(what=error.what, where=error.where, why=error.why, fix=error.fix)
        )
        code = error.exit_code
    except (EOFError, TimeoutError):
        code = AGAIN_CODE  # the owner has gone
    outgoing.drain(_LAST_WORDS_S)
    return code


def shares_disk(order: PodOrder, index: int) -> bool:
    """Say whether what a pod writes is seen by the first one: its own slot, or all of them on a volume."""
    return order.has_volume or index == 0


def place_code(
    order: PodOrder, brought: str, incoming: FrameReader, outgoing: FrameWriter
) -> SweepPlan:
    """Unpack the code, which is in the Secret or comes from the first pod; return the plan that names it.

    Raises:
        EOFError: The owner has hung up.
    """
    run_dir, code = order.run_dir, CodeOutputs(order.run_dir)
    came = os.path.join(brought, orders.CODE_FILE)
    os.makedirs(os.path.dirname(run_dir.agent_log("slot")), mode=0o700, exist_ok=True)
    wants = not code.is_there and not os.path.exists(came)
    outgoing.send(messages.Placed(run_dir=run_dir.path, wants_code=wants))
    if wants:
        _take_code(run_dir, incoming)
    elif not code.is_there:
        shutil.copyfile(came, order.archive)
    if not code.is_there:
        code.unpack()
    call = os.path.join(brought, orders.CALL_FILE)
    if os.path.exists(call) and not os.path.exists(run_dir.call):
        with open(call, "rb") as file:
            atomic.replace_file(run_dir.call, file.read(), mode=0o600)
    plain = atomic.read_json(os.path.join(brought, orders.SWEEP_FILE))
    return plan_here(codec.from_plain(SweepPlan, plain), order, code.root)


def plan_here(plan: SweepPlan, order: PodOrder, code_root: str) -> SweepPlan:
    """Return the plan for the copy of the code, and for an interpreter that the image has."""
    program = code_copy.moved(plan.run.program, order.code_root, code_root)
    if shutil.which(program.python[0] if program.python else "") is None:
        program = replace(program, python=(sys.executable, *program.python[1:]))
    if program.call is not None:
        program = replace(program, call=replace(program.call, source=order.run_dir.call))
    return replace(plan, run=replace(plan.run, program=program, engine="local"))


def _take_code(run_dir: RunDir, incoming: FrameReader) -> None:
    while not isinstance(message := _read(incoming), messages.CodeSent):
        if isinstance(message, messages.FilePiece) and message.path == messages.CODE_FILE:
            write_piece(run_dir.path, message.path, message.offset, message.data)


def _read(incoming: FrameReader) -> messages.RemoteMessage:
    message = incoming.read(SILENCE_S)
    if message is None:
        raise EOFError
    return message


@dataclass(slots=True)
class _Running:
    number: int
    attempt: int
    run_dir: RunDir
    lacks_bytes: int
    stream: RecordStream | None = None


@dataclass(slots=True)
class _Slot:
    order: PodOrder
    plan: SweepPlan
    incoming: FrameReader
    outgoing: FrameWriter
    is_leaving: bool = False
    _running: _Running | None = None
    _slots: Slots = field(init=False)
    _disk: DiskWriter = field(init=False)
    _inbox: "asyncio.Queue[messages.RemoteMessage | None]" = field(init=False)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    async def serve(self) -> int:
        """Serve to the end of the connection; return the exit code."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._leave)
        self._inbox = asyncio.Queue()
        threading.Thread(target=self._hear, args=(loop,), name="owner", daemon=True).start()
        self.outgoing.ping_every(PING_EVERY_S)
        self._disk = DiskWriter(root=self.order.run_dir.path)
        self._disk.start()
        self._slots = self._make_slots()
        try:
            await self._slots.open()
            if (refusal := self._slots.refusal) is not None:
                raise _refused(refusal)
            self.outgoing.send(messages.SetUpDone())
            while (message := await self._inbox.get()) is not None:
                await self._take(message)
        finally:
            await self._slots.close()
            self._disk.flush(_FLUSH_S)
        return AGAIN_CODE

    def _make_slots(self) -> Slots:
        # One slot, which sees all GPUs of its pod.
        plan = replace(self.plan, slots=1)
        if not plan.is_forked:
            return RunSlots([()], self._take_end)
        log = self.order.run_dir.agent_log(f"slot-{own_index(os.environ)}")
        return ForkSlots(plan, [None], log, self._disk, self._take_end, self._say)

    def _say(self, sentence: str) -> None:
        self.outgoing.send(messages.RemoteNote(text=sentence))

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        message: messages.RemoteMessage | None = None
        while True:
            try:
                message = self.incoming.read(SILENCE_S)
            except (TimeoutError, messages.FrameError, OSError):
                message = None
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._inbox.put_nowait, message)
            if message is None:
                return

    async def _take(self, message: messages.RemoteMessage) -> None:
        match message:
            case StartMember():
                if self.is_leaving:
                    lost = MemberEnded(
                        member=message.member, state=RunState.PREEMPTED, is_lost=True
                    )
                    self.outgoing.send(lost)
                    return
                await self._prepare(message)
            case messages.FilePiece(path=path, offset=offset, data=data) if self._running:
                await asyncio.to_thread(write_piece, self._running.run_dir.path, path, offset, data)
                self._running.lacks_bytes -= len(data)
                self._start_if_whole(self._running)
            case SignalMember(member=number, signum=signum):
                self._slots.signal(number, signum)

    def _leave(self) -> None:
        """Let the member save, as whoever takes this pod away wants it; the owner starts it again elsewhere."""
        self.is_leaving = True
        self.outgoing.send(SlotLeaves())
        if self._running is None:
            self._inbox.put_nowait(None)
        else:
            self._slots.signal(self._running.number, signal.SIGTERM)

    async def _prepare(self, start: StartMember) -> None:
        number, sizes = start.member, start.sizes
        folder = member_dir(self.order.run_dir, self.plan, number)
        running = _Running(number, start.attempt, folder, sum(sizes.values()))
        if not shares_disk(self.order, own_index(os.environ)):
            await asyncio.to_thread(prepare_member, self.order.run_dir, self.plan, number)
            for name in (RunDir.events, RunDir.training):
                # An attempt here may have written more than its owner has got.
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(os.path.join(folder.path, name), sizes.get(name, 0))
            running.stream = RecordStream(folder, self.outgoing, sizes)
        self._running = running
        self._start_if_whole(running)

    def _start_if_whole(self, running: _Running) -> None:
        if running.lacks_bytes > 0:
            return
        if running.stream is not None:
            running.stream.start()
        self._slots.start(running.number, running.run_dir, running.attempt, 0)

    def _take_end(self, number: int, end: MemberEnd) -> None:
        task = asyncio.create_task(self._tell_end(number, end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_end(self, number: int, end: MemberEnd) -> None:
        running, self._running = self._running, None
        await asyncio.to_thread(self._disk.flush, _FLUSH_S)
        if running is not None and running.stream is not None:
            running.stream.stop()
            await asyncio.to_thread(running.stream.send_new, small_files=True)
        if not self.order.has_volume:
            await asyncio.to_thread(self._send_outputs)
        is_lost = end.is_lost or (self.is_leaving and end.state is not RunState.SUCCEEDED)
        self.outgoing.send(
            MemberEnded(member=number, state=end.state, worker=end.worker, is_lost=is_lost)
        )
        if self.is_leaving:
            self._inbox.put_nowait(None)

    def _send_outputs(self) -> None:
        """Send what the member has made in the copy of the code, so that it comes to whoever asked for the sweep."""
        code = CodeOutputs(self.order.run_dir)
        if stay := code.send(self.outgoing):
            more = f" and {len(stay) - 1} more" if len(stay) > 1 else ""
            self._say(f"{stay[0]}{more} is too large to come back, and goes with its pod")
        code.note()


def _refused(report: Report) -> MusterError:
    why = "\n".join(report.because) or None
    return MusterError(report.error, where=report.at, why=why, fix=report.hint)
