"""How long many nodes take to find each other: muster's coordinator beside torchrun's c10d rendezvous.

    python benchmarks/rendezvous.py [--repeats 5] [--json FILE]

All callers exist and wait at a barrier; the time runs from the moment they are let go to the moment the
last one has its ranks. Three kinds of callers:

* real agents: processes that run muster's agent, without a spawner;
* light clients: the agent's side of the protocol, many to a process, for numbers that no machine of
  this size can hold as processes;
* torchrun: processes that run torch's DynamicRendezvousHandler on the c10d backend, forked from one
  that has imported torch (starting them apart would take longer, and is not measured).
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from torchmuster import proc
from torchmuster.agent.coordinator import Coordinator, CoordinatorOptions
from torchmuster.agent.main import StoreDesk
from torchmuster.files.disk import DiskWriter
from torchmuster.files.layout import RunDir
from torchmuster.model.plan import Limits, Program, RunPlan, ScriptKind
from torchmuster.net import listener, messages
from torchmuster.net.channel import connect
from torchmuster.net.handshake import Role

SECRET = b"benchmark benchmark benchmark 32"
LIGHT_PROCESSES = 2
TIMEOUT_S = 300.0
Forking = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One rendezvous.

    Attributes:
        seconds: From the release of the callers to the last one's ranks.
        coordinator_mib: Peak resident memory of the coordinator's process; None for torchrun.
        messages_per_node: Frames that the coordinator sent and received, per node.
    """

    seconds: float
    coordinator_mib: float | None = None
    messages_per_node: float | None = None


# The coordinator, in a process of its own.


def make_plan(num_nodes: int) -> RunPlan:
    """Return the plan of a run in which nothing is ever started."""
    program = Program(
        kind=ScriptKind.COMMAND, target="true", args=(), python=(sys.executable,), cwd=os.getcwd()
    )
    return RunPlan(
        run_id="benchmark",
        program=program,
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        workers_per_node=(1,),
        limits=Limits(join_timeout_s=TIMEOUT_S),
    )


def coordinate(num_nodes: int, folder: str, listening: Any, answer: Any) -> None:
    """Serve one rendezvous; answer with memory and messages once every node is told its ranks."""
    _raise_descriptor_limit()
    counted = {"in": 0}

    class Counting(Coordinator):
        def _take(self, source: Any, message: Any) -> None:
            counted["in"] += 1
            super()._take(source, message)

    disk = DiskWriter()
    disk.start()
    options = CoordinatorOptions(
        plan=make_plan(num_nodes),
        run_dir=RunDir(folder),
        open_store=StoreDesk().open,
        own_address="127.0.0.1",
    )
    coordinator = Counting(options, disk)

    async def serve() -> None:
        door = listener.Listener(
            listening, (SECRET, None), coordinator.serve, coordinator.refuse_stranger
        )
        serving = asyncio.create_task(door.serve())
        conducting = asyncio.create_task(coordinator.conduct())
        async with asyncio.timeout(TIMEOUT_S):
            while coordinator.attempt is None:
                await asyncio.sleep(0.01)
        # Sent to each node: the welcome and the start; taken from each: what `_take` counted.
        per_node = 2 + counted["in"] / num_nodes
        answer.send((_peak_mib(), per_node))
        answer.recv()
        conducting.cancel()
        serving.cancel()
        await asyncio.gather(serving, conducting, return_exceptions=True)

    asyncio.run(serve())
    os._exit(0)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# Callers.


async def call_once(port: int, number: int, gate: asyncio.Semaphore) -> float:
    """Play one agent up to its ranks; return the time at which it has them."""
    async with gate:
        channel = await connect("127.0.0.1", port, Role.AGENT, SECRET)
    channel.send_nowait(
        messages.Hello(
            incarnation=f"{number:016x}",
            version=_version(),
            host=f"n{number}",
            pid=os.getpid(),
            boot_id="",
            num_workers=1,
            place=number,
            wants_place_0=number == 0,
        )
    )
    channel.send_nowait(messages.Ping(number=1))
    while not isinstance(await channel.receive(), messages.StartAttempt):
        pass
    at = time.monotonic()
    _kept.append(channel)  # an agent that hangs up would end the attempt
    return at


_kept: list[Any] = []


def _version() -> str:
    import torchmuster

    return torchmuster.__version__


def light_clients(port: int, numbers: range, barrier: Barrier, out: Any) -> None:
    """Play many agents in one process."""
    _raise_descriptor_limit()

    # Thousands of nodes have thousands of processors; these share one, so that each would keep the
    # coordinator waiting for its half of the handshake. A few at a time answer as promptly as a node.
    gate = asyncio.Semaphore(24)

    async def play() -> float:
        async def one(number: int) -> float:
            return await call_once(port, number, gate)

        return max(await asyncio.gather(*(one(number) for number in numbers)))

    barrier.wait()
    out.send(asyncio.run(_bounded(play())))
    out.recv()
    os._exit(0)


async def _bounded(work: Any) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        return await work


def real_agent(port: int, number: int, barrier: Barrier, out: Any) -> None:
    """Run muster's own agent up to its ranks."""
    import socket

    from torchmuster.agent.node import Agent, AgentOptions
    from torchmuster.agent.voice import LogVoice
    from torchmuster.agent.worker_socket import make_socket_folder

    reached: list[float] = []

    class Measured(Agent):
        def _obey(self, message: Any) -> None:
            super()._obey(message)
            if isinstance(message, messages.StartAttempt) and not reached:
                reached.append(time.monotonic())
                out.send(reached[0])

    class NoSpawner:
        pid = 0

        def poll(self) -> int | None:
            return None

    folder = make_socket_folder()
    disk = DiskWriter()
    disk.start()
    options = AgentOptions(
        program=make_plan(1).program,
        num_workers=1,
        host=f"n{number}",
        addresses=(("127.0.0.1", port),),
        secret=SECRET,
        run_dir=RunDir,
        join_timeout_s=TIMEOUT_S,
        place=number,
        is_head=number == 0,
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    voice = LogVoice(os.path.join(folder, "log"), disk)
    socket_path = os.path.join(folder, "agent.sock")

    async def live() -> None:
        spawner: Any = (NoSpawner(), ours)
        agent = Measured(options, spawner, socket_path, disk, voice)
        await asyncio.wait_for(agent.run(), TIMEOUT_S)

    barrier.wait()
    try:
        asyncio.run(live())
    finally:
        theirs.close()
        os._exit(0)


# torchrun's side.


def torchrun_agent(port: int, num_nodes: int, number: int, barrier: Barrier, out: Any) -> None:
    """Run torch's own rendezvous handler up to its ranks."""
    import torch.distributed.elastic.rendezvous.registry as registry
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"127.0.0.1:{port}",
        run_id="benchmark",
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        is_host=number == 0,
        last_call_timeout=1,
        join_timeout=int(TIMEOUT_S),
    )
    barrier.wait()
    handler = registry.get_rendezvous_handler(parameters)
    handler.next_rendezvous()
    out.send(time.monotonic())
    out.recv()
    os._exit(0)


# Measuring.


def measure_muster(num_nodes: int, start: Callable[[int, Barrier, list[Any]], int]) -> Reading:
    """Measure one rendezvous on muster's coordinator; `start` makes the callers."""
    with tempfile.TemporaryDirectory() as folder:
        listening = listener.bind("127.0.0.1", 0)
        port = int(listening.getsockname()[1])
        here, there = Forking.Pipe()
        head = Forking.Process(target=coordinate, args=(num_nodes, folder, listening, there))
        head.start()
        listening.close()
        seconds = measure_callers(port, start)
        memory, per_node = here.recv()
        here.send("done")
        head.join(10)
        head.kill()
        return Reading(
            seconds=seconds,
            coordinator_mib=round(memory, 1),
            messages_per_node=round(per_node, 2),
        )


def measure_callers(port: int, start: Callable[[int, Barrier, list[Any]], int]) -> float:
    """Let all callers go at once; return the seconds until the last has its ranks."""
    barrier = Forking.Barrier(_callers_of(start) + 1)
    pipes: list[Any] = []
    before = set(proc.children_of(os.getpid()))
    start(port, barrier, pipes)
    barrier.wait()
    released = time.monotonic()
    try:
        reached = [_receive(pipe) for pipe in pipes]
    finally:
        for pid in set(proc.children_of(os.getpid())) - before:
            proc.kill_quietly(pid)
        for process in multiprocessing.active_children():
            if process.pid not in before:
                process.join(10)
    return max(reached) - released


def _receive(pipe: Any) -> float:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError("a caller did not get its ranks")
    return float(pipe.recv())


_NUM_CALLERS: dict[Any, int] = {}


def _callers_of(start: Any) -> int:
    return _NUM_CALLERS[start]


def start_light(num_nodes: int) -> Callable[[int, Barrier, list[Any]], int]:
    """Return what starts the light clients."""

    def start(port: int, barrier: Barrier, pipes: list[Any]) -> int:
        for part in range(LIGHT_PROCESSES):
            numbers = range(part, num_nodes, LIGHT_PROCESSES)
            _launch(light_clients, (port, numbers, barrier), pipes)
        return LIGHT_PROCESSES

    _NUM_CALLERS[start] = LIGHT_PROCESSES
    return start


def start_real(num_nodes: int) -> Callable[[int, Barrier, list[Any]], int]:
    """Return what starts the real agents."""

    def start(port: int, barrier: Barrier, pipes: list[Any]) -> int:
        for number in range(num_nodes):
            _launch(real_agent, (port, number, barrier), pipes)
        return num_nodes

    _NUM_CALLERS[start] = num_nodes
    return start


def start_torchrun(num_nodes: int) -> Callable[[int, Barrier, list[Any]], int]:
    """Return what starts torchrun's agents."""

    def start(port: int, barrier: Barrier, pipes: list[Any]) -> int:
        for number in range(num_nodes):
            _launch(torchrun_agent, (port, num_nodes, number, barrier), pipes)
        return num_nodes

    _NUM_CALLERS[start] = num_nodes
    return start


def _launch(target: Callable[..., None], arguments: tuple[Any, ...], pipes: list[Any]) -> None:
    here, there = Forking.Pipe()
    Forking.Process(target=target, args=(*arguments, there), daemon=True).start()
    there.close()
    pipes.append(here)


def measure_torchrun(num_nodes: int) -> Reading:
    """Measure torchrun's side in a process of its own, so that torch weighs on nobody else."""
    argv = [sys.executable, __file__, "--torchrun", str(num_nodes)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return Reading(seconds=float(done.stdout))


def measure_torchrun_here(num_nodes: int) -> float:
    """Import torch once, fork the agents, let them go, and return the seconds."""
    import torch.distributed.elastic.rendezvous.registry  # noqa: F401 - for the forks

    probe = listener.bind("127.0.0.1", 0)
    port = int(probe.getsockname()[1])
    probe.close()
    return measure_callers(port, start_torchrun(num_nodes))


# The table.

CASES: list[tuple[str, int, Callable[[int], Reading]]] = [
    ("muster, real agents", 64, lambda n: measure_muster(n, start_real(n))),
    ("torchrun c10d", 64, measure_torchrun),
    ("muster, real agents", 128, lambda n: measure_muster(n, start_real(n))),
    ("torchrun c10d", 128, measure_torchrun),
    ("muster, real agents", 256, lambda n: measure_muster(n, start_real(n))),
    ("muster, light clients", 256, lambda n: measure_muster(n, start_light(n))),
    ("muster, light clients", 1024, lambda n: measure_muster(n, start_light(n))),
    ("muster, light clients", 4096, lambda n: measure_muster(n, start_light(n))),
]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/rendezvous.json"))
    parser.add_argument("--torchrun", type=int, metavar="N", help=argparse.SUPPRESS)
    options = parser.parse_args()
    _raise_descriptor_limit()
    if options.torchrun:
        print(measure_torchrun_here(options.torchrun))
        return 0
    readings: dict[tuple[str, int], list[Reading]] = {(c, n): [] for c, n, _ in CASES}
    for repeat in range(options.repeats):
        for case, num_nodes, measure in CASES:
            reading = measure(num_nodes)
            readings[case, num_nodes].append(reading)
            print(f"{repeat + 1}: {case}, {num_nodes}: {reading.seconds:.2f} s", file=sys.stderr)
    rows = [summarize(case, num_nodes, found) for (case, num_nodes), found in readings.items()]
    print_table(rows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    facts = {"cores": os.cpu_count(), "python": platform.python_version()}
    options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    return 0


def summarize(case: str, num_nodes: int, readings: list[Reading]) -> dict[str, Any]:
    """Return the medians of one case."""
    memory = [r.coordinator_mib for r in readings if r.coordinator_mib is not None]
    counts = [r.messages_per_node for r in readings if r.messages_per_node is not None]
    return {
        "case": case,
        "nodes": num_nodes,
        "seconds": round(statistics.median(r.seconds for r in readings), 3),
        "all_seconds": [round(r.seconds, 3) for r in readings],
        "coordinator_mib": max(memory) if memory else None,
        "messages_per_node": statistics.median(counts) if counts else None,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows as Markdown."""
    print("| callers | nodes | seconds (median) | ms a node | coordinator MiB | messages a node |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        each = 1000 * row["seconds"] / row["nodes"]
        memory = row["coordinator_mib"] or "-"
        count = row["messages_per_node"] or "-"
        print(
            f"| {row['case']} | {row['nodes']} | {row['seconds']:.2f} | {each:.2f} | {memory} | {count} |"
        )


if __name__ == "__main__":
    sys.exit(main())
