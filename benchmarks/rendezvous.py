"""How long many nodes take to find each other: muster's head beside torchrun's c10d rendezvous.

    python benchmarks/rendezvous.py [--repeats 3] [--quick] [--torchrun PATH] [--json FILE] [--limit SECONDS]

A second measure: how long they take to the next attempt when one of their workers is killed.

All callers exist and wait at a barrier; the time runs from the moment they are let go to the moment the
last one has its ranks. Three kinds of callers:

* real agents: processes that run muster's agent, without a spawner;
* light agents: the same class, many to a process, for numbers that no machine of this size can hold as processes;
* torchrun: processes that run torch's DynamicRendezvousHandler on the c10d backend, forked from one
  that has imported torch (starting them apart would take longer, and is not measured).
"""

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))

from launching import processes  # noqa: E402
from launching.sides import torch_of  # noqa: E402
from meeting.agents import killable_agents, light_agents, real_agent  # noqa: E402
from meeting.head import coordinate, raise_descriptor_limit  # noqa: E402
from running.results import FOLDER, headline, machine_facts, save  # noqa: E402
from running.stage import Stage, stage  # noqa: E402
from torchmuster.core.net.address import bind  # noqa: E402

LIGHT_PROCESSES = 2
ONE_LIMIT_S = 120.0  # of one rendezvous
FULL: dict[str, tuple[int, ...]] = {
    "real": (64, 128, 256),
    "light": (256, 1024, 4096),
    "torchrun": (64, 128),
    "killed": (512, 2048, 4096),
}
QUICK: dict[str, tuple[int, ...]] = {
    "real": (3,),
    "light": (24,),
    "torchrun": (2,),
    "killed": (24,),
}
WORKERS_PER_NODE = 8  # of which one is killed
Forking = multiprocessing.get_context("fork")


class LostError(Exception):
    """A rendezvous did not come about; the message says what was missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One rendezvous.

    Attributes:
        seconds: From the release of the callers to the last one's ranks; None when it was lost.
        head_mib: Peak resident memory of the head's process; None for torchrun.
        messages_per_node: Frames that the head sent and received, per node.
        head_s: Processor seconds of the head, where a worker was killed.
        longest_turn_s: For how long it did not answer then.
    """

    seconds: float | None = None
    head_mib: float | None = None
    messages_per_node: float | None = None
    head_s: float | None = None
    longest_turn_s: float | None = None
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    callers: str
    num_nodes: int
    measure: Callable[[], Reading]


# Measuring.

Start = Callable[[int, list[Any], list[Any]], None]


def measure_muster(num_callers: int, num_nodes: int, launch: Callable[..., None]) -> Reading:
    """Measure one rendezvous on muster's head; `launch` starts the callers."""
    with tempfile.TemporaryDirectory() as folder:
        listening = bind("127.0.0.1", 0)
        port = int(listening.getsockname()[1])
        here, there = Forking.Pipe()
        head = Forking.Process(
            target=coordinate, args=(num_nodes, ONE_LIMIT_S, folder, listening, there)
        )
        head.start()
        listening.close()
        there.close()
        try:
            seconds = release(num_callers, partial(launch, port), here)
            memory, per_node = _answer_of(here)
            here.send(None)
        finally:
            processes.kill_descendants()
        return Reading(
            seconds=seconds,
            head_mib=round(memory, 1),
            messages_per_node=round(per_node, 2),
        )


def measure_killed(num_nodes: int) -> Reading:
    """Measure the next attempt, from the death of a worker to the last agent's ranks."""
    with tempfile.TemporaryDirectory() as folder:
        listening = bind("127.0.0.1", 0)
        port = int(listening.getsockname()[1])
        here, there = Forking.Pipe()
        order = (num_nodes, ONE_LIMIT_S, folder, listening, there, WORKERS_PER_NODE)
        head = Forking.Process(target=coordinate, args=order)
        head.start()
        listening.close()
        there.close()
        pipes: list[Any] = []
        try:
            release(LIGHT_PROCESSES, partial(launch_killable, num_nodes, port), here, pipes)
            memory, _ = _answer_of(here)
            here.send("begin")
            _answer_of(here)
            killed_at = time.monotonic()
            for pipe in pipes:
                pipe.send(pipe is pipes[-1])
            again_at = max(_receive(pipe, killed_at + ONE_LIMIT_S, here) for pipe in pipes)
            here.send("end")
            head_s, longest_turn_s = _answer_of(here)
            here.send(None)
        finally:
            processes.kill_descendants()
        return Reading(
            seconds=again_at - killed_at,
            head_mib=round(memory, 1),
            head_s=round(head_s, 2),
            longest_turn_s=round(longest_turn_s, 2),
        )


def _answer_of(head: Any) -> tuple[float, float]:
    if not head.poll(10.0):
        raise LostError("the head does not answer")
    answer = head.recv()
    if isinstance(answer, str):
        raise LostError(answer)
    memory, per_node = answer
    return float(memory), float(per_node)


def release(
    num_callers: int,
    launch: Callable[[Barrier, list[Any]], None],
    head: Any,
    pipes: list[Any] | None = None,
) -> float:
    """Let all callers go at once; return the seconds until the last has its ranks. Their pipes are added to `pipes`."""
    barrier = Forking.Barrier(num_callers + 1)
    pipes = [] if pipes is None else pipes
    launch(barrier, pipes)
    barrier.wait(ONE_LIMIT_S)
    released = time.monotonic()
    reached = [_receive(pipe, released + ONE_LIMIT_S, head) for pipe in pipes]
    return max(reached) - released


def _receive(pipe: Any, deadline: float, head: Any) -> float:
    try:
        said = pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else None
    except EOFError:
        raise LostError("a caller ended without a message") from None
    if said is None:
        _answer_of(head)  # which has the same limit, and knows more
        raise LostError(f"a caller has no ranks after {ONE_LIMIT_S:g} s")
    if isinstance(said, str):
        raise LostError(said)
    return float(said)


def launch_light(num_nodes: int, port: int, barrier: Barrier, pipes: list[Any]) -> None:
    """Start light agents in a few processes."""
    for part in range(LIGHT_PROCESSES):
        _launch(light_agents, (port, range(part, num_nodes, LIGHT_PROCESSES), barrier), pipes)


def launch_killable(num_nodes: int, port: int, barrier: Barrier, pipes: list[Any]) -> None:
    """Start light agents in a few processes, which play the deaths of their workers, too."""
    for part in range(LIGHT_PROCESSES):
        numbers = range(part, num_nodes, LIGHT_PROCESSES)
        _launch(killable_agents, (port, numbers, WORKERS_PER_NODE, barrier), pipes)


def launch_real(num_nodes: int, port: int, barrier: Barrier, pipes: list[Any]) -> None:
    """Start a process for each agent."""
    for number in range(num_nodes):
        _launch(real_agent, (port, number, barrier), pipes)


def _launch(target: Callable[..., None], arguments: tuple[Any, ...], pipes: list[Any]) -> None:
    here, there = Forking.Pipe()
    Forking.Process(target=target, args=(*arguments, there), daemon=True).start()
    there.close()
    pipes.append(here)


def measure_torchrun(python: str, num_nodes: int) -> Reading:
    """Measure torchrun's side in a process of its own, so that torch weighs on nobody else."""
    probe = bind("127.0.0.1", 0)
    port = int(probe.getsockname()[1])
    probe.close()
    script = Path(__file__).with_name("meeting") / "peers.py"
    argv = [python, str(script), str(num_nodes), str(port), str(ONE_LIMIT_S)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=2 * ONE_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise LostError(f"torchrun's agents did not end within {2 * ONE_LIMIT_S:g} s") from None
    if done.returncode != 0:
        raise LostError(done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")
    return Reading(seconds=float(done.stdout))


# The table.


def make_cases(sizes: dict[str, tuple[int, ...]], torchrun: Sequence[Path]) -> list[Case]:
    """Return the rows: those of one size stand beside each other."""
    cases = []
    pythons = {"torchrun c10d": sys.executable}
    for path in torchrun:
        python, version = torch_of(path)
        pythons[f"torchrun {version} c10d"] = python
    for num_nodes in sizes["real"]:
        launch = partial(launch_real, num_nodes)
        measure = partial(measure_muster, num_nodes, num_nodes, launch)
        cases.append(Case(callers="muster, real agents", num_nodes=num_nodes, measure=measure))
    for callers, python in pythons.items():
        for num_nodes in sizes["torchrun"]:
            measure = partial(measure_torchrun, python, num_nodes)
            cases.append(Case(callers=callers, num_nodes=num_nodes, measure=measure))
    for num_nodes in sizes["light"]:
        launch = partial(launch_light, num_nodes)
        measure = partial(measure_muster, LIGHT_PROCESSES, num_nodes, launch)
        cases.append(Case(callers="muster, light agents", num_nodes=num_nodes, measure=measure))
    for num_nodes in sizes["killed"]:
        measure = partial(measure_killed, num_nodes)
        what = f"muster, light agents of {WORKERS_PER_NODE} ranks, a rank is killed"
        cases.append(Case(callers=what, num_nodes=num_nodes, measure=measure))
    return sorted(cases, key=lambda case: case.num_nodes)


def take(case: Case) -> Reading:
    """Measure once; what is lost says why."""
    try:
        return case.measure()
    except LostError as lost:
        return Reading(lost=str(lost))


def measure_all(running: Stage, cases: Sequence[Case], repeats: int) -> list[dict[str, Any]]:
    """Measure all cases in turn, again and again; return the rows."""
    found: list[list[Reading]] = [[] for _ in cases]
    for repeat in range(repeats):
        for case, readings in zip(cases, found, strict=True):
            what = f"round {repeat + 1} of {repeats}: {case.callers}, {case.num_nodes} nodes"
            running.step(what)
            reading = take(case)
            readings.append(reading)
            running.tell(
                f"{what}: {reading.seconds:.2f} s" if reading.seconds else f"lost: {reading.lost}"
            )
    return [summarize(case, readings) for case, readings in zip(cases, found, strict=True)]


def summarize(case: Case, readings: Sequence[Reading]) -> dict[str, Any]:
    """Return the medians of one case."""
    seconds = [r.seconds for r in readings if r.seconds is not None]
    memory = [r.head_mib for r in readings if r.head_mib is not None]
    counts = [r.messages_per_node for r in readings if r.messages_per_node is not None]
    return {
        "case": case.callers,
        "nodes": case.num_nodes,
        "seconds": round(statistics.median(seconds), 3) if seconds else None,
        "all_seconds": [round(value, 3) for value in seconds],
        "head_mib": max(memory) if memory else None,
        "messages_per_node": statistics.median(counts) if counts else None,
        "head_s": _most(r.head_s for r in readings),
        "longest_turn_s": _most(r.longest_turn_s for r in readings),
        "lost": [r.lost for r in readings if r.lost],
    }


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| callers | nodes | seconds (median) | ms a node | head MiB | messages a node | head's processor s | its longest turn s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds, each = "lost", "-"
        if row["seconds"] is not None:
            seconds = f"{row['seconds']:.2f}"
            each = f"{1000 * row['seconds'] / row['nodes']:.2f}"
        memory, count = row["head_mib"] or "-", row["messages_per_node"] or "-"
        lines.append(
            f"| {row['case']} | {row['nodes']} | {seconds} | {each} | {memory} | {count} |"
            f" {row['head_s'] or '-'} | {row['longest_turn_s'] or '-'} |"
        )
    lines += [f"lost: {row['case']}, {row['nodes']}: {why}" for row in rows for why in row["lost"]]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a few nodes, once")
    parser.add_argument(
        "--torchrun", type=Path, action="append", default=[], help="another environment's torchrun"
    )
    parser.add_argument("--json", type=Path, default=FOLDER / "rendezvous.json")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for all of it")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    machine = machine_facts()
    processes.adopt_orphans()
    raise_descriptor_limit()
    with stage("rendezvous", options.limit) as running:
        try:
            cases = make_cases(QUICK if options.quick else FULL, options.torchrun)
            rows = measure_all(running, cases, repeats)
        finally:
            processes.kill_descendants()
    head = headline(machine, f"median of {repeats} rounds")
    save(options.json, {"machine": machine, "rows": rows}, f"{head}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
