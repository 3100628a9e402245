"""What it costs to see a run: 512 ranks that light agents play, a real head, and `muster top` on a terminal.

    python benchmarks/eyes.py [--quick] [--json FILE] [--limit SECONDS]

* head: its processor time in percent of one core, while every rank is reported once a second: twice as often as real
  agents do. Without a board (the code takes reports for the hang watch only), with nobody looking, and with a viewer.
* viewer: from its start to the first picture, and to the picture with all ranks; its own processor time.
* ports: on which the head listens, before and while somebody looks.
* an hour: 1,800 reports of every rank through the board, as fast as they go: memory after ten minutes and at the end.
* agent: the processor time of one report of eight real processes, with what each has started.
* worker: its heartbeats and its share of its agent's reports, together in percent of a step of 10 ms.
"""

import argparse
import asyncio
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from torchmuster.launcher.head.parts import Board

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))

from meeting.agents import MOST_HANDSHAKES, LightAgent  # noqa: E402
from meeting.head import SECRET, make_plan, raise_descriptor_limit  # noqa: E402
from running.results import FOLDER, headline, machine_facts, save  # noqa: E402
from running.stage import Stage, stage  # noqa: E402
from torchmuster.core import proc  # noqa: E402
from torchmuster.core.files import atomic  # noqa: E402
from torchmuster.core.files.disk import DiskWriter  # noqa: E402
from torchmuster.core.files.layout import RunDir, runs_dir  # noqa: E402
from torchmuster.core.head.options import TrainingHeadOptions  # noqa: E402
from torchmuster.core.head.training_head import TrainingHead  # noqa: E402
from torchmuster.core.model import codec  # noqa: E402
from torchmuster.core.model.progress import RankPhase  # noqa: E402
from torchmuster.core.net import listener, messages  # noqa: E402
from torchmuster.core.node.setup import make_socket_folder  # noqa: E402
from torchmuster.core.programs.head_host import StorePorts  # noqa: E402
from torchmuster.launcher.model.progress import RankProgress  # noqa: E402
from torchmuster.launcher.net import part_messages  # noqa: E402
from torchmuster.launcher.node.inquiries import ProgressReader  # noqa: E402

WORKERS = 8
RUN_ID = "20270115-080000-train-3f2a"
REPORT_EVERY_S = 1.0
_AGENTS_EVERY_S, _STEP_S = 2.0, 0.01
sys.path.append(str(SOURCE.parent / "tests"))

from kit.screen import TerminalOf  # type: ignore[import-not-found]  # noqa: E402

Forking = multiprocessing.get_context("fork")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def report_of(rank: int, steps: int) -> RankProgress:
    """Return what an agent tells of a rank that makes twenty steps a second."""
    seconds = [0.0] * len(RankPhase)
    slow = rank == 1
    seconds[RankPhase.DATA] = steps * (0.02 if slow else 0.01)
    seconds[RankPhase.FORWARD] = steps * 0.012345
    return RankProgress(
        rank=rank,
        state="S",
        active_s=steps * 0.04,
        io_bytes=steps * 12_345,
        rss_mib=2345 + rank,
        gpu_percent=91,
        gpu_mib=67_890,
        beat_age_s=0.021,
        steps_here=steps,
        step=steps,
        step_at=1000.0 + steps * 0.05,
        phase=RankPhase.COMPUTE,
        seconds=tuple(seconds),
        median_s=0.05,
        p99_s=0.061,
    )


class ReportingAgent(LightAgent):
    """A light agent whose workers run as soon as they are asked for."""

    async def _obey(self, message: messages.Message) -> bool:
        if isinstance(message, messages.StartAttempt) and not self.reached_at.done():
            pids = tuple([os.getpid()] * message.ranks.num_workers)
            started = messages.WorkersStarted(
                attempt=message.attempt, pids=pids, spawner_pid=os.getpid()
            )
            self.link.send(started)
            self.reporting = asyncio.create_task(self._report(message))
        return await super()._obey(message)

    async def _report(self, order: messages.StartAttempt) -> None:
        ranks = range(order.ranks.first_rank, order.ranks.first_rank + order.ranks.num_workers)
        began_at = time.monotonic()
        await asyncio.sleep(order.ranks.node_rank % 64 / 64 * REPORT_EVERY_S)  # not all at once
        while True:
            steps = int((time.monotonic() - began_at) * 20) + 1
            reports = tuple(report_of(rank, steps) for rank in ranks)
            self.link.send(part_messages.Progress(attempt=order.attempt, ranks=reports))
            await asyncio.sleep(REPORT_EVERY_S)


def play_agents(port: int, numbers: range) -> None:
    """Be these agents until the process is killed."""
    raise_descriptor_limit()
    folder, disk = make_socket_folder(), DiskWriter()
    disk.start()

    async def live() -> None:
        gate = asyncio.Semaphore(MOST_HANDSHAKES)
        agents = [ReportingAgent(n, port, folder, disk, gate, WORKERS) for n in numbers]
        await asyncio.gather(*(agent.live() for agent in agents))

    asyncio.run(live())


def play_head(run_dir: RunDir, num_nodes: int, listening: Any, *, has_board: bool) -> None:
    """Be the head of the run until the process is killed."""
    raise_descriptor_limit()
    disk = DiskWriter()
    disk.start()
    options = TrainingHeadOptions(plan=make_plan(num_nodes, WORKERS), run_dir=run_dir)
    head = TrainingHead(options, disk, StorePorts().open)
    if not has_board:
        del head.parts["board"]  # to measure what it costs

    async def serve() -> None:
        door = listener.Listener(listening, (SECRET, None), head.serve, head.refuse_stranger)
        serving = asyncio.create_task(door.serve())
        await head.conduct()
        serving.cancel()

    asyncio.run(serve())


def measure_head(running: Stage, num_nodes: int, seconds: float) -> dict[str, Any]:
    """Return what the head and a viewer of so many nodes cost."""
    found: dict[str, Any] = {}
    for has_board in (False, True):
        running.step(f"{num_nodes * WORKERS} ranks, {'with' if has_board else 'without'} the board")
        found |= _one_head(running, num_nodes, seconds, has_board=has_board)
    return found


def _one_head(running: Stage, num_nodes: int, seconds: float, *, has_board: bool) -> dict[str, Any]:
    run_dir = RunDir(os.path.join(runs_dir(), RUN_ID))
    os.makedirs(run_dir.path, exist_ok=True)
    for name in os.listdir(run_dir.path):
        path = os.path.join(run_dir.path, name)
        if os.path.isfile(path):
            os.unlink(path)
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listening.setblocking(False)
    port = listening.getsockname()[1]
    _write_run(run_dir, num_nodes, port)
    half = num_nodes // 2
    head = Forking.Process(
        target=play_head, args=(run_dir, num_nodes, listening), kwargs={"has_board": has_board}
    )
    agents = [
        Forking.Process(target=play_agents, args=(port, numbers))
        for numbers in (range(half), range(half, num_nodes))
    ]
    for process in (head, *agents):
        process.start()
    listening.close()
    try:
        _wait_for(lambda: "workers_started" in _text(run_dir.events), 60.0)
        _pause(3.0)  # the first reports of all have come
        key = "nobody looks" if has_board else "no board"
        found = {f"head, {key}, % of a core": _cpu_percent(head.pid, seconds)}
        if has_board:
            found |= _look(running, head.pid, num_nodes, seconds)
            found["head, MiB"] = round(_rss_mib(head.pid))
        return found
    finally:
        for process in (head, *agents):
            process.kill()
            process.join()


def _write_run(run_dir: RunDir, num_nodes: int, port: int) -> None:
    facts = proc.read_process(os.getpid())
    owner = {
        "pid": os.getpid(),
        "start_ticks": facts.start_ticks if facts is not None else 0,
        "boot_id": proc.boot_id(),
        "host": os.uname().nodename,
    }
    atomic.write_json(run_dir.plan, codec.to_plain(make_plan(num_nodes, WORKERS)))
    atomic.write_json(run_dir.owner, owner)
    atomic.write_json(run_dir.head, {"host": "127.0.0.1", "port": port})
    fd = os.open(run_dir.secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(fd, SECRET.hex().encode())
    os.close(fd)


def _look(running: Stage, head_pid: int | None, num_nodes: int, seconds: float) -> dict[str, Any]:
    running.step("a viewer")
    command = [sys.executable, "-m", "torchmuster", "top", RUN_ID]
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm-256color"}
    before = _listening(head_pid)
    found: dict[str, Any] = {}
    with TerminalOf(command, env, columns=100, rows=40) as screen:
        screen.wait_for("train-3f2a  running")
        found["viewer, first picture, s"] = round(time.monotonic() - screen.began_at, 2)
        screen.wait_for("steps/s", "WAIT", limit_s=60)
        found["viewer, all ranks, s"] = round(time.monotonic() - screen.began_at, 2)
        _read_for(screen, 3.0)
        own, head = _ticks(screen.pid), _ticks(head_pid)
        _read_for(screen, seconds)
        found["head, a viewer, % of a core"] = _percent(_ticks(head_pid) - head, seconds)
        found["viewer, % of a core"] = _percent(_ticks(screen.pid) - own, seconds)
        found["ports of the head"] = f"{before}, with a viewer {_listening(head_pid)}"
        screen.press("q")
        screen.wait_for_end()
    return found


def measure_hour(num_ranks: int, reports: int) -> dict[str, Any]:
    """Return what an hour of reports leaves in memory and on the disk."""
    written: list[int] = []
    board = Board(lambda line: written.append(len(line)))
    nodes = {rank: f"node{rank // WORKERS:03}" for rank in range(num_ranks)}
    board.begin(0.0, 0, nodes)
    early = 0.0
    for number in range(1, reports + 1):
        now = number * 2.0
        board.take(now, [report_of(rank, number * 40) for rank in range(num_ranks)])
        board.advance(now)
        board.answer(now, "a")
        if number == reports // 6:
            early = _rss_mib(os.getpid())
    late = _rss_mib(os.getpid())
    return {
        "hour, process after ten minutes, MiB": round(early, 1),
        "hour, process at the end, MiB": round(late, 1),
        "hour, record, MiB": round(sum(written) / (1 << 20), 1),
    }


def measure_agent(reports: int) -> dict[str, Any]:
    """Return the processor time of one report of eight processes with two children each."""
    code = (
        "import subprocess, sys\n"
        "sleeper = [sys.executable, '-S', '-c', 'import sys; sys.stdin.read()']\n"
        "children = [subprocess.Popen(sleeper, stdin=subprocess.PIPE) for _ in range(2)]\n"
        "print('up', flush=True)\nsys.stdin.read()"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for _ in range(WORKERS)
    ]
    try:
        for child in started:
            assert child.stdout is not None
            child.stdout.readline()
        with tempfile.TemporaryDirectory() as folder:
            reader = ProgressReader(folder, 0)
            workers = [(rank, child.pid) for rank, child in enumerate(started)]
            reader.read(workers)
            before = time.process_time()
            for _ in range(reports):
                reader.read(workers)
            spent_s = (time.process_time() - before) / reports
    finally:
        for child in started:
            os.killpg(child.pid, 9)
            child.wait()
    share_us = spent_s / WORKERS / (_AGENTS_EVERY_S / _STEP_S) * 1e6
    beats_us = _median_beats_us()
    return {
        "agent, one report of 8 ranks, ms": round(spent_s * 1000, 2),
        "agent, a report every 2 s, % of a core": round(spent_s / _AGENTS_EVERY_S * 100, 2),
        "worker, heartbeats of a step, us": round(beats_us, 2),
        "worker, with its share of the reports, % of a step of 10 ms": round(
            (beats_us + share_us) / 1e4 / _STEP_S, 3
        ),
    }


def _median_beats_us() -> float:
    from running.beats import (
        heartbeats_us,
    )  # imports torch, which the memory of the hour must not show

    with tempfile.TemporaryDirectory() as folder:
        return median(heartbeats_us(0, Path(folder)) for _ in range(9))


def _cpu_percent(pid: int | None, seconds: float) -> float:
    before = _ticks(pid)
    _pause(seconds)
    return _percent(_ticks(pid) - before, seconds)


def _percent(ticks: int, seconds: float) -> float:
    return round(ticks / _TICKS_PER_S / seconds * 100, 1)


def _ticks(pid: int | None) -> int:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12])


def _rss_mib(pid: int | None) -> float:
    with open(f"/proc/{pid}/statm", "rb") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / (1 << 20)


def _listening(pid: int | None) -> int:
    """Return on how many ports of TCP a process listens."""
    links = [os.path.join(f"/proc/{pid}/fd", name) for name in os.listdir(f"/proc/{pid}/fd")]
    own = {os.readlink(link) for link in links}
    found = 0
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as lines:
            rows = [line.split() for line in lines][1:]
        found += sum(row[3] == "0A" and f"socket:[{row[9]}]" in own for row in rows)
    return found


def _read_for(screen: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        screen.read()


def _pause(seconds: float) -> None:
    reader, _writer = Forking.Pipe()
    _never(reader, seconds)


def _never(reader: Connection, seconds: float) -> None:
    reader.poll(seconds)


def _wait_for(is_so: Any, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit("the agents did not begin to report")
        _pause(0.05)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def main() -> None:
    """Measure, print a table, keep it."""
    parser = argparse.ArgumentParser(description="What it costs to see a run.")
    parser.add_argument("--quick", action="store_true", help="few ranks, a short time")
    parser.add_argument("--json", type=Path, default=FOLDER / "eyes.json")
    parser.add_argument("--limit", type=float, default=600.0)
    options = parser.parse_args()
    machine = machine_facts()
    num_nodes, seconds, reports = (2, 2.0, 60) if options.quick else (64, 20.0, 1800)
    with stage("eyes", options.limit) as running:
        found = measure_head(running, num_nodes, seconds)
        running.step("an hour, played fast")
        found |= measure_hour(num_nodes * WORKERS, reports)
        running.step("an agent's reports")
        found |= measure_agent(reports // 3)
    how = f"{num_nodes * WORKERS} ranks, a report of each every {REPORT_EVERY_S:g} s"
    rows = "\n".join(f"| {name} | {value} |" for name, value in found.items())
    text = f"{headline(machine, how)}\n\n| | |\n|---|---|\n{rows}\n"
    save(options.json, {"machine": machine, "rows": found}, text)


if __name__ == "__main__":
    main()
