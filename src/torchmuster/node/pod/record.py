"""Sends the record of a run from its first pod to a client, from where the client has it, until the run has ended.

    pod-record --order FILE [--once] [--outputs]

One line of JSON comes first: how much the client has of each file, and of which record. Then messages of
`net/remote_messages.py` go to standard output; the last one says that nothing follows. With `--once` that is what there is now, with
`--outputs` also what the tasks of a group have made.
"""

import argparse
import json
import os
import sys
import threading
from typing import Any

from torchmuster.net import remote_messages as messages
from torchmuster.net.frames import FrameWriter
from torchmuster.node.pod.order import PodOrder, read_order
from torchmuster.node.pod.outputs import TaskOutputs
from torchmuster.node.pod.sweep_record import SweepStream, noted_job
from torchmuster.node.remote.files import CodeOutputs, RecordStream, mark_of

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
    order = read_order(options.order)
    run_dir = order.run_dir
    known: Any = json.loads(sys.stdin.buffer.readline(_MAX_FIRST_BYTES))
    # Nothing that is imported may write between the messages.
    outgoing = os.dup(1)
    os.dup2(2, 1)
    gone = threading.Event()
    threading.Thread(target=_wait_for_end, args=(gone,), daemon=True).start()
    while not (mark := _mark_of_record(order)) and not gone.is_set() and not options.once:
        gone.wait(_EVERY_S)  # its owner has not made it yet
    session = FrameWriter(outgoing)
    session.send(messages.RecordOf(mark=mark))
    sizes = known["sizes"] if known["mark"] == mark else {}
    stream: RecordStream | SweepStream
    made: CodeOutputs | TaskOutputs | None
    if order.is_sweep:  # what members have made is in their folders
        stream, made = SweepStream(run_dir, session, sizes), None
    else:
        stream = RecordStream(run_dir, session, sizes, group=order.group)
        made = CodeOutputs(run_dir) if order.group is None else TaskOutputs(order)
    while not gone.is_set():
        has_ended = os.path.exists(order.ended)
        stream.send_new(small_files=has_ended)
        if has_ended or options.once:
            wanted = made is not None and (has_ended or options.outputs)
            stay = made.send(session) if made is not None and wanted else []
            end = messages.RecordEnd(num_stay=len(stay), stay=tuple(stay[:20]), is_over=has_ended)
            session.send(end)
            session.drain(_DRAIN_S)
            gone.wait(_DRAIN_S)  # the client hangs up when it has everything
            break
        gone.wait(_EVERY_S)
    return 0


def _mark_of_record(order: PodOrder) -> str:
    """Return the mark of the run's record; empty while there is none, or on a volume that of an earlier Job of a sweep."""
    is_other = order.is_sweep and noted_job(order.run_dir) != order.job
    return "" if is_other else mark_of(order.run_dir.path)


def _wait_for_end(gone: threading.Event) -> None:
    while sys.stdin.buffer.read(1):
        pass
    gone.set()
