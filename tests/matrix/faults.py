"""The twelve faults: how each is made from outside, and what the right answer is."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from matrix.world import NODES, WORKERS

FIRST, OTHER = NODES
VICTIM = 3  # a rank on the other node
PORT = 29500  # what many scripts use
# It ends with its standard input, also where killing the command that led to it does not reach it.
TAKE_PORT = f"""
import select, socket, sys
taken = socket.create_server(("", {PORT}))
print("taken", flush=True)
while sys.stdin not in select.select([taken, sys.stdin], [], [])[0]:
    taken.accept()[0].close()
"""
OTHERS = "somebody-elses"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the matrix.

    Attributes:
        name: As `--fault` takes it.
        title: Of its row.
        made: How it is made, for the page.
        hurt: Makes it while a run trains, and returns when, in seconds since 1970.
        before: Makes it before the run is started; returns options of `World.run`.
        shown: What the terminal has to show, a regular expression with {node} and {interface}.
        state: Of the result.
        kind: Of the end that is the cause; None where no worker's end is.
        ranks: Which the cause may name; empty where it is no rank.
        node: That has to be named.
        only_lease: Whether it is silence that tells, where the world is silent.
        goes_on: Whether a run with it does not have to end by itself.
    """

    name: str
    title: str
    made: str
    shown: str
    hurt: Callable | None = None
    before: Callable | None = None
    state: str = "failed"
    kind: str | None = None
    ranks: tuple[int, ...] = ()
    node: str | None = OTHER
    only_lease: bool = False
    goes_on: bool = False


def break_batch(running):
    return _give(running, VICTIM, "broken")


def grow_batch(running):
    _give(running, VICTIM, str(2**31))
    return running.world.wait_out_of_memory()


def _give(running, rank, text):
    path = running.world.data / f"batch-{rank}"
    new = path.with_suffix(".new")
    new.write_text(text)
    now = time.time()
    new.replace(path)
    return now


def kill_worker(running):
    return _kill(running, OTHER, running.pids()[VICTIM])


def kill_head(running):
    return _kill(running, FIRST, running.agent_pid(FIRST))


def _kill(running, node, pid):
    now = time.time()
    running.world.on(node, "kill", f"-{signal.SIGKILL.value}", pid)
    return now


def lose_node(running):
    now = time.time()
    running.world.kill_node(OTHER)
    return now


def cut_link(running):
    now = time.time()
    running.world.cut_link(OTHER)
    return now


def fill_disk(running):
    now = time.time()
    path = running.world.scratch / OTHERS
    # dd ends with an error when the disk is full, which is what is wanted.
    running.world.on(OTHER, "sh", "-c", 'dd if=/dev/zero of="$0" bs=64k 2>/dev/null; sync', path)
    return now


def wait_time_limit(running):
    return running.world.wait_time_limit(running)


def cancel(running):
    now = time.time()
    running.world.cancel()
    return now


def remove_package(world, _stack):
    world.on(OTHER, "rm", "-r", world.scratch / "packages")
    return {}


def name_wrong_interface(world, _stack):
    return {"options": ("--env", f"GLOO_SOCKET_IFNAME={world.wrong_interface}")}


def take_port(world, stack):
    words = world.argv(FIRST, [sys.executable, "-S", "-c", TAKE_PORT, OTHERS])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other = stack.enter_context(subprocess.Popen(words, **pipes))
    assert other.stdout.readline() == b"taken\n"
    return {"script_options": ("--port", str(PORT))}


def limit_time(world, _stack):
    return {"options": ("--time", world.time_limit)}


FAULTS = (
    Fault(
        name="exception",
        title="exception on another node",
        made=f"the file that rank {VICTIM} reads its next batch from gets rubbish",
        hurt=break_batch,
        shown=r"rank 3 raised ValueError",
        kind="exception",
        ranks=(VICTIM,),
    ),
    Fault(
        name="sigkill",
        title="SIGKILL",
        made=f"`kill -9` of the process of rank {VICTIM}",
        hurt=kill_worker,
        shown=r"rank 3 was ended by SIGKILL",
        kind="signal",
        ranks=(VICTIM,),
    ),
    Fault(
        name="memory",
        title="out of memory",
        made=f"the node's control group has 1.5 GiB, and the next batch of rank {VICTIM} has 8",
        hurt=grow_batch,
        shown=r"rank 3 was ended by SIGKILL because memory ran out",
        kind="signal",
        ranks=(VICTIM,),
    ),
    Fault(
        name="node",
        title="node lost",
        made="the node's link is cut and all of its processes are killed, as when a power supply dies",
        hurt=lose_node,
        shown=r"\b{node} was lost",
        kind="node_lost",
        only_lease=True,
    ),
    Fault(
        name="head",
        title="head lost",
        made="`kill -9` of the agent of the first node, which has the head in it",
        hurt=kill_head,
        shown=r"head.*SIGKILL",
        node=FIRST,
    ),
    Fault(
        name="link",
        title="link cut",
        made="the link of the second node goes down; its processes live, and find it up again when its workers are dead",
        hurt=cut_link,
        shown=r"\b{node} was lost",
        kind="node_lost",
        only_lease=True,
    ),
    Fault(
        name="package",
        title="package missing on one node",
        made="a package that the script imports is removed from the second node's disk before the start",
        before=remove_package,
        shown=r"raised ModuleNotFoundError: No module named 'matrix_tokens'",
        kind="exception",
        ranks=(2, 3),
    ),
    Fault(
        name="interface",
        title="wrong interface",
        made="`GLOO_SOCKET_IFNAME` names one that does not lead to the other node",
        before=name_wrong_interface,
        shown=r"(?s)(?=.*GLOO_SOCKET_IFNAME)(?=.*\b{interface}\b)",
        state="",
        node=None,
        goes_on=True,
    ),
    Fault(
        name="port",
        title="port taken",
        made=f"another program listens on the port {PORT} of the first node, where the script wants to meet",
        before=take_port,
        shown=rf"(?s)rank 0 raised .*port {PORT} is taken",
        kind="exception",
        ranks=(0,),
        node=FIRST,
    ),
    Fault(
        name="disk",
        title="disk full",
        made="the second node's own disk, to which its first rank saves, is filled",
        hurt=fill_disk,
        shown=r"ranks? [\d,]+ raised OSError: \[Errno 28\] No space left on device",
        kind="exception",
        ranks=(WORKERS,),
    ),
    Fault(
        name="time",
        title="time limit",
        made="the job's time is over",
        before=limit_time,
        hurt=wait_time_limit,
        shown=r"timed out",
        state="timed out",
        node=None,
    ),
    Fault(
        name="cancel",
        title="cancel",
        made="`muster cancel`",
        hurt=cancel,
        shown=r"cancelled",
        state="cancelled",
        node=None,
    ),
)
