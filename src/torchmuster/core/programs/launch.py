"""Make the launch of an agent from the command line that an owner or an engine has written."""

import contextlib
import json
import os
import socket
from dataclasses import dataclass, replace

from torchmuster.core import plugs
from torchmuster.core.files.claims import Claims
from torchmuster.core.files.layout import RunDir, size_of, trained_last
from torchmuster.core.head.options import HeadCredentials, TrainingHeadOptions
from torchmuster.core.model import codec
from torchmuster.core.model.codec import from_arguments, moment_of
from torchmuster.core.model.lines import Terminal
from torchmuster.core.model.plan import Program, RunPlan
from torchmuster.core.net.address import read_secret, split_endpoint
from torchmuster.core.node.options import (
    AgentOptions,
    AgentOrder,
    HeadPlace,
    share_threads,
    take_environment,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLaunch:
    """One process with an agent, and at place 0 with the head of its run.

    Attributes:
        head: The head's options; None on other nodes, as is its socket `listening`.
        lifeline_fd: Its end of file means that the owner of the run is gone.
        agent_log: Log file of the agent; None: this terminal.
        notes: Sentences to print first.
        error_file: File for the failure in torchrun's JSON.
    """

    agent: AgentOptions
    head: TrainingHeadOptions | None = None
    listening: socket.socket | None = None
    lifeline_fd: int | None = None
    agent_log: str | None = None
    notes: tuple[str, ...] = ()
    error_file: str | None = None


def read_launch(arguments: list[str]) -> AgentLaunch:
    """Return the launch for an agent's command line, with plan and key from its run directory."""
    order = from_arguments(AgentOrder, arguments)
    if order.environment is not None:
        take_environment(order.environment)
    run_dir = RunDir(order.run_dir)
    plan = read_plan_file(run_dir.path)
    addresses = tuple(map(split_endpoint, order.head))
    name, num_workers = plan.node_name(order.place), plan.num_workers(order.place)
    listening = head = None
    if order.listen_fd is not None:
        listening = socket.socket(fileno=order.listen_fd)
        listening.setblocking(False)
        head = TrainingHeadOptions(
            plan=plan,
            run_dir=run_dir,
            own_address=addresses[0][0],
            first_attempt=order.first_attempt,
            restarts_spent=order.restarts_spent,
            why=f"after attempt {order.first_attempt - 1}" if order.first_attempt else "start",
            samples_bytes=size_of(run_dir.samples),
            has_owner=order.lifeline_fd is not None,
            office=_office(order, plan, run_dir),
            left_out=machines_left_out(run_dir) if order.first_attempt else frozenset(),
            expected=trained_last(plan, run_dir)
            if order.first_attempt and plan.spares
            else frozenset(),
            began_at=began_at(run_dir) if order.first_attempt else 0.0,
        )
    server_program = _session_program(plan.program, run_dir) if plan.is_session else None
    agent = AgentOptions(
        plan=plan if server_program is None else replace(plan, program=server_program),
        num_workers=num_workers,
        host=name,
        head=HeadPlace(
            addresses=addresses,
            secret=read_secret(run_dir.secret),
            join_timeout_s=plan.limits.join_timeout_s,
            file=run_dir.moved if head is None else None,
            heirs=run_dir.succession
            if head is None and Claims(run_dir.succession).has_heirs
            else None,
        ),
        environment={**job_environment(num_workers), **dict(plan.node_setup.environment)},
        run_dir=run_dir.path,
        place=order.place,
        is_head=head is not None,
        terminal=Terminal.from_word(order.terminal) if order.terminal is not None else None,
    )
    return AgentLaunch(
        agent=agent,
        head=head,
        listening=listening,
        lifeline_fd=order.lifeline_fd,
        agent_log=run_dir.agent_log(name),
    )


def _office(order: AgentOrder, plan: RunPlan, run_dir: RunDir) -> HeadCredentials | None:
    """Return the credentials a head needs for each attempt, if another node may replace it."""
    if order.term is None:
        return None
    return HeadCredentials(
        claims=Claims(run_dir.succession),
        term=order.term,
        holder=order.holder,
        place=order.place,
        node=plan.node_name(order.place),
    )


def read_plan_file(path: str) -> RunPlan:
    """Return the plan in a run directory, as seen by this node."""
    with open(RunDir(path).plan) as file:
        return codec.from_plain(RunPlan, json.load(file))


def _session_program(program: Program, run_dir: RunDir) -> Program:
    """Return the command of a session's server, with this node's interpreter and run directory."""
    entry = plugs.entry("session_server")
    first, *flags = program.python
    return replace(program, target=first, args=(*flags, entry, run_dir.path))


def machines_left_out(run_dir: RunDir) -> frozenset[str]:
    """Return machines that computed wrong results in this run, earlier jobs included."""
    found: set[str] = set()
    try:
        with open(run_dir.events, errors="replace") as record:
            for line in record:
                if '"event":"node_left_out"' in line:
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        found.add(str(json.loads(line)["machine"]))
    except OSError:  # nothing is known
        return frozenset()
    return frozenset(found)


def began_at(run_dir: RunDir) -> float:
    """Return when the run's first head began, from its record; 0 if unknown."""
    try:
        with open(run_dir.events, errors="replace") as record:
            starts = (line for line in record if '"event":"run_started"' in line)
            return moment_of(json.loads(next(starts, "{}")).get("time")) or 0.0
    except (OSError, ValueError):
        return 0.0


def job_environment(num_workers: int) -> dict[str, str]:
    """Return the environment for the job's interpreter: ours with torchrun's additions."""
    environment = dict(os.environ)
    share_threads(environment, num_workers)
    return environment
