"""`pod-record` sends a run's record from its first pod to a client until the run has ended.

It speaks the protocol of `launcher/net/replica.py`. With `--once` it sends only what there is now,
with `--outputs` also the outputs of a group's tasks, with `--kept` the copy of the first pod's
record that `pod-keep` holds here. A client that holds everything says so before the pod ends.
"""

import contextlib
import os
import threading
from dataclasses import dataclass

from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.kubernetes.node.keep import PodSession, kept_folder, kept_scope
from torchmuster.kubernetes.node.order import PodOrder, read_order
from torchmuster.kubernetes.node.place import TaskOutputs, send_outputs_of_others
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.remote_messages import FrameReader, FrameWriter
from torchmuster.launcher.net.replica import CopyScope, CopyState, Feed
from torchmuster.launcher.node.remote.files import RUN_RECORD, CodeOutputs, mark_of, scope_of_group

_EVERY_S = 0.2
_DRAIN_S = 30.0
_FIRST_S = 60.0
_SILENCE_S = 24 * 3600.0
_SLOW_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordWords:
    """The command line of `pod-record`: the file of the pod's order, and what to send."""

    order: str
    once: bool = False
    outputs: bool = False
    kept: bool = False


def scope_of(order: PodOrder) -> CopyScope:
    """Return which files of the first pod's folder are the record of an order."""
    return RUN_RECORD if order.group is None else scope_of_group(order.group)


def main(arguments: list[str]) -> int:
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
    if not mark_of(root):
        writer.send(messages.CopyOf(mark=""))
    while not (mark := mark_of(root)) and not gone.is_set() and not words.once:
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
    made = CodeOutputs(order.run_dir) if order.group is None else TaskOutputs(order)
    stay = made.send(writer) if is_over or wanted else []
    if is_over and order.group is None:
        send_outputs_of_others(writer, order)
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
