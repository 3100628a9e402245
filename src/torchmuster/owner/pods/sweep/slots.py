"""The slots of a sweep in pods: one in each pod, which opens when the pod answers, and again when the Job has made the pod anew.

The owner in the first pod starts `pod-slot` through the doors of all pods (`slot.py` here), its own among them. What a member
writes comes through the same connection, so that the whole record of the sweep is in the first pod.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmuster.engines.ssh_files import FilesBack
from torchmuster.files.layout import RunDir
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Report
from torchmuster.net import remote_messages as messages
from torchmuster.net.channel import Channel, ChannelClosedError
from torchmuster.net.handshake import HandshakeError
from torchmuster.net.slot_messages import MemberEnded, SignalMember, SlotLeaves, StartMember
from torchmuster.node.pod.call import call_patiently, words_of
from torchmuster.node.pod.order import PROGRAMS_VARIABLE, PodOrder
from torchmuster.node.pod.session import COMMAND, ERRORS, INPUT, OUTPUT, PIECE_BYTES
from torchmuster.owner.pods.sweep.slot import PING_EVERY_S, SILENCE_S, shares_disk
from torchmuster.owner.sweep.slots import MemberEnd, TakeEnd, TakeSlot

_AGAIN_S = 1.0
_SAY_AFTER_S = 4.5
_FROM = "slot"  # where pieces come from, for `FilesBack`
Write = Callable[[str, dict[str, object]], None]


@dataclass(slots=True)
class _Member:
    number: int
    run_dir: RunDir
    files: FilesBack


@dataclass(slots=True)
class _Slot:
    index: int
    outgoing: "asyncio.Queue[bytes]" = field(default_factory=asyncio.Queue)
    member: _Member | None = None
    is_open: bool = False
    is_leaving: bool = False
    buffer: bytearray = field(default_factory=bytearray)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of a message on its way out


class PodSlots:
    """Starts members in the pods of a sweep.

    Args:
        order: Of the pods.
        secret: The run's key.
        archive: The code, for pods that don't have it in their Secret; they get it from here.
        is_forked: Members are single processes, whose events are the owner's.
        take_end: Called with a member and how it ended.
        take_slot: Called when a slot opens or closes.
        say: Tells the user a sentence.
        event: Leaves an event in the record.

    Attributes:
        refusal: A pod can't start any member, so no pod can: all are of one image.
    """

    come_later = True

    def __init__(
        self,
        order: PodOrder,
        secret: bytes,
        archive: str,
        take_end: TakeEnd,
        take_slot: TakeSlot,
        say: Callable[[str], None],
        event: Write,
        *,
        is_forked: bool,
    ) -> None:
        self.refusal: Report | None = None
        self._order, self._secret, self._archive = order, secret, archive
        self._take_end, self._take_slot = take_end, take_slot
        self._say, self._event, self._is_forked = say, event, is_forked
        self._slots = [_Slot(index) for index in range(order.num_pods)]
        self._tasks: list[asyncio.Task[None]] = []

    def host(self, slot_number: int) -> str:
        """Return the name of a slot's pod."""
        return self._order.host(slot_number)

    async def open(self) -> None:
        """Begin to call the pods; each slot opens when its pod answers."""
        self._tasks = [asyncio.create_task(self._hold(slot)) for slot in self._slots]

    async def close(self) -> None:
        """Hang up, which ends what runs in the pods."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, number: int, run_dir: RunDir, attempt: int, slot_number: int) -> None:
        """Start a member in a slot, behind what its earlier attempts have left."""
        slot = self._slots[slot_number]
        slot.member = _Member(number, run_dir, FilesBack(run_dir))
        left: dict[str, bytes] = {}
        grow = (RunDir.training,) if self._is_forked else (RunDir.events, RunDir.training)
        if not shares_disk(self._order, slot_number):
            for name in grow:
                with (
                    contextlib.suppress(OSError),
                    open(os.path.join(run_dir.path, name), "rb") as f,
                ):
                    left[name] = f.read()
        sizes = {name: len(data) for name, data in left.items()}
        self._send(slot, StartMember(member=number, attempt=attempt, sizes=sizes))
        for name, data in left.items():
            self._send_pieces(slot, name, data)

    def signal(self, number: int, signum: int) -> None:
        """Send a signal to a member, if it runs."""
        for slot in self._slots:
            if slot.member is not None and slot.member.number == number:
                self._send(slot, SignalMember(member=number, signum=signum))

    def _send(self, slot: _Slot, message: messages.RemoteMessage) -> None:
        slot.outgoing.put_nowait(messages.pack(message))

    def _send_pieces(self, slot: _Slot, path: str, data: bytes) -> None:
        for at in range(0, len(data), messages.CHUNK_BYTES):
            piece = data[at : at + messages.CHUNK_BYTES]
            self._send(slot, messages.FilePiece(path=path, offset=at, data=piece))

    # One slot.

    async def _hold(self, slot: _Slot) -> None:
        """Keep a slot open, as long as there is a pod for it."""
        host = self._order.address(slot.index) if slot.index else "127.0.0.1"
        loop = asyncio.get_running_loop()
        since, told = loop.time(), ""
        while self.refusal is None:
            try:
                channel = await call_patiently(host, self._order.port, self._secret, 0.0)
                since, told = loop.time(), ""
                try:
                    await self._serve(slot, channel)
                finally:
                    channel.abort()
            except (OSError, HandshakeError, ChannelClosedError, messages.FrameError) as error:
                why = words_of(error)
                if slot.is_open and not slot.is_leaving:
                    self._event("node_lost", {"node": self.host(slot.index), "why": why})
                elif told != why and loop.time() - since > _SAY_AFTER_S:
                    told = why
                    self._say(f"no slot yet in {self.host(slot.index)}: {why}")
            finally:
                self._close(slot)
            await asyncio.sleep(_AGAIN_S)

    def _close(self, slot: _Slot) -> None:
        """Take that nothing runs in a slot any more."""
        member, slot.member = slot.member, None
        was_sent_away = slot.is_leaving
        slot.is_open = slot.is_leaving = False
        slot.outgoing = asyncio.Queue()
        slot.buffer.clear()
        self._take_slot(slot.index, False)
        if member is not None:
            lost = MemberEnd(
                state=RunState.LOST,
                is_lost=True,
                has_lost_slot=True,
                was_sent_away=was_sent_away,
            )
            self._take_end(member.number, lost)

    async def _serve(self, slot: _Slot, channel: Channel) -> None:
        """Take what one slot sends until its connection ends.

        Raises:
            ChannelClosedError: It has.
            OSError: The same.
        """
        # A shell of the pod knows how our programs are started there.
        await channel.send_bytes(COMMAND + f"exec ${PROGRAMS_VARIABLE} pod-slot".encode())
        writing = asyncio.create_task(self._write(slot, channel))
        log_path = self._order.run_dir.agent_log(f"slot-{slot.index}")
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    frame = await channel.receive_bytes()
                if frame[:1] == OUTPUT:
                    slot.buffer += frame[1:]
                    for message in _messages_in(slot.buffer):
                        await self._take(slot, channel, message)
                elif frame[:1] == ERRORS:
                    await asyncio.to_thread(_append, log_path, frame[1:])
                else:
                    raise ChannelClosedError("its slot has ended")
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, slot: _Slot, channel: Channel) -> None:
        ping = messages.pack(messages.RemotePing())
        while True:
            try:
                async with asyncio.timeout(PING_EVERY_S):
                    data = await slot.outgoing.get()
            except TimeoutError:
                data = ping
            await _put(slot, channel, data)

    async def _send_code(self, slot: _Slot, channel: Channel) -> None:
        """Send the archive, no more of it at once than the connection takes: all slots may want it."""
        with await asyncio.to_thread(open, self._archive, "rb") as file:
            offset = 0
            while data := await asyncio.to_thread(file.read, messages.CHUNK_BYTES):
                piece = messages.FilePiece(path=messages.CODE_FILE, offset=offset, data=data)
                await _put(slot, channel, messages.pack(piece))
                offset += len(data)
        await _put(slot, channel, messages.pack(messages.CodeSent()))

    async def _take(self, slot: _Slot, channel: Channel, message: messages.RemoteMessage) -> None:
        match message:
            case messages.Placed(wants_code=True):
                await self._send_code(slot, channel)
            case messages.SetUpDone():
                slot.is_open = True
                self._event("agent_joined", {"node": self.host(slot.index)})
                self._take_slot(slot.index, True)
            case messages.RemoteNote(text=text):
                self._say(f"{self.host(slot.index)}: {text}")
            case messages.RemoteFailed():
                because = tuple((message.why or "").splitlines())
                self.refusal = Report(
                    error=message.what,
                    at=message.where or self.host(slot.index),
                    because=because,
                    hint=message.fix,
                )
            case SlotLeaves():
                slot.is_leaving = True
                self._take_slot(slot.index, False)
            case messages.FilePiece() if slot.member is not None:
                await asyncio.to_thread(slot.member.files.take, message, _FROM)
            case MemberEnded() if slot.member is not None:
                await self._take_member(slot, slot.member, message)

    async def _take_member(self, slot: _Slot, member: _Member, ended: MemberEnded) -> None:
        if ended.member != member.number:
            raise messages.FrameError(f"member {ended.member} does not run there")
        folder = os.path.join(member.run_dir.path, "output")
        with contextlib.suppress(OSError, ValueError):
            await asyncio.to_thread(member.files.unpack, _FROM, folder)
        slot.member = None
        end = MemberEnd(
            state=ended.state,
            worker=None if ended.is_lost else ended.worker,
            is_lost=ended.is_lost,
            has_lost_slot=slot.is_leaving,
            was_sent_away=slot.is_leaving,
        )
        self._take_end(member.number, end)


def _append(path: str, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


async def _put(slot: _Slot, channel: Channel, data: bytes) -> None:
    async with slot.lock:
        for at in range(0, len(data), PIECE_BYTES):
            await channel.send_bytes(INPUT + data[at : at + PIECE_BYTES])


def _messages_in(buffer: bytearray) -> "list[messages.RemoteMessage]":
    """Return the whole messages at the beginning of a buffer, and take them out of it.

    Raises:
        messages.FrameError: There is something else.
    """
    found = []
    size = messages.LENGTH.size
    while len(buffer) >= size:
        (length,) = messages.LENGTH.unpack_from(buffer)
        if length > messages.MAX_FRAME_BYTES:  # raw pieces are none of a slot's
            raise messages.FrameError(f"a frame of {length} bytes")
        if len(buffer) < size + length:
            break
        found.append(messages.decode(bytes(buffer[size : size + length])))
        del buffer[: size + length]
    return found
