"""Sends the record of a run from its first pod to a client, from where the client has it, until the run has ended.

    pod-record --order FILE [--once] [--outputs]

One line of JSON comes first: how much the client has of each file, and of which record; and the order of the pod that has
written it, where that is another one. Then messages of
`net/remote_messages.py` go to standard output; the last one says that nothing follows, and the client answers `held` when it
has put everything in its place. With `--once` that is what there is now, with
`--outputs` also what the tasks of a group have made.
"""

import argparse
import json
import os
import sys
import threading
from typing import Any

from torchmuster.files import atomic
from torchmuster.model import codec
from torchmuster.net import remote_messages as messages
from torchmuster.net.frames import FrameWriter
from torchmuster.node.pod.order import PodOrder, read_order
from torchmuster.node.pod.outputs import TaskOutputs, send_outputs_of_others
from torchmuster.node.remote.files import CodeOutputs, RecordStream, mark_of

HELD = b"held\n"  # of a client that has put everything in its place
_EVERY_S = 0.2
_MAX_FIRST_BYTES = 1 << 20
_DRAIN_S = 30.0


def main(arguments: list[str]) -> int:
    """Send the record to its end, or until nobody reads it any more."""
    parser = argparse.ArgumentParser(prog="pod-record")
    parser.add_argument("--order", required=True)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--outputs", action="store_true")
    options = parser.parse_args(arguments)
    known: Any = json.loads(sys.stdin.buffer.readline(_MAX_FIRST_BYTES))
    told = known.get("order")  # of another pod, whose record is on a volume that this one sees
    order = read_order(options.order) if told is None else codec.from_plain(PodOrder, told)
    run_dir = order.run_dir
    # Nothing that is imported may write between the messages.
    outgoing = os.dup(1)
    os.dup2(2, 1)
    gone = threading.Event()
    threading.Thread(target=_wait_for_end, args=(gone, order), daemon=True).start()
    session = FrameWriter(outgoing)
    if not mark_of(run_dir.path):
        session.send(messages.RecordOf(mark=""))
    while not (mark := mark_of(run_dir.path)) and not gone.is_set() and not options.once:
        gone.wait(_EVERY_S)  # its owner has not made it yet
    if mark:
        session.send(messages.RecordOf(mark=mark))
    sizes = known["sizes"] if known["mark"] == mark else {}
    stream = RecordStream(run_dir, session, sizes, group=order.group)
    while not gone.is_set():
        has_ended = os.path.exists(order.ended)
        stream.send_new(small_files=has_ended)
        if has_ended or options.once:
            # What came along is known only when it has been unpacked.
            made = CodeOutputs(run_dir) if order.group is None else TaskOutputs(order)
            stay = made.send(session) if has_ended or options.outputs else []
            if has_ended and order.group is None:
                send_outputs_of_others(session, order)
            end = messages.RecordEnd(num_stay=len(stay), stay=tuple(stay[:20]), is_over=has_ended)
            session.send(end)
            session.drain(_DRAIN_S)
            gone.wait(_DRAIN_S)  # the client hangs up when it has everything
            break
        gone.wait(_EVERY_S)
    return 0


def _wait_for_end(gone: threading.Event, order: PodOrder) -> None:
    """Wait until the client hangs up; note what it says before: that it holds everything."""
    while line := sys.stdin.buffer.readline(_MAX_FIRST_BYTES):
        if line == HELD:
            atomic.write_json(order.held, {})
    gone.set()
