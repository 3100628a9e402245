"""The owner of a workflow: it starts each group when its inputs and resources are available.

This process is `muster submit`, also for tasks on ssh hosts (`workflow/owner/task_hosts.py`). With
`--detach`, a background process replaces it. When the owner dies, the workflow ends, because the
heads of its groups see their lifeline close. `muster restart` continues with the unfinished groups.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from torchmuster.core import plugs, proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, runs_dir
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.core.model import codec
from torchmuster.core.model.events import NoticeEvent, RecordEvent, event_of
from torchmuster.core.model.owner_policy import AfterLoss, OwnerPolicy, RestartBudget
from torchmuster.core.model.text import report_of_error
from torchmuster.core.model.verdict import Report
from torchmuster.core.net import messages
from torchmuster.core.net.address import bind
from torchmuster.core.node.kernel import visible_gpus
from torchmuster.core.owner.create import make_dir
from torchmuster.core.owner.parts import HeadFollower, RecordWriter, Stops
from torchmuster.core.owner.session import EarlyStop, note_on_session
from torchmuster.errors import MusterError, RunDirectoryError
from torchmuster.launcher.owner.origin import note_origin
from torchmuster.workflow.head import task_messages
from torchmuster.workflow.owner.capacity import Capacity, HostCapacity, Machine, this_machine
from torchmuster.workflow.owner.view import read_workflow
from torchmuster.workflow.plan import GroupInput, GroupPlan, WorkflowPlan
from torchmuster.workflow.record import (
    GroupEndedEvent,
    GroupOutcome,
    GroupStateEvent,
    GroupWaitsEvent,
    HeadLostEvent,
    State,
    TaskStateEvent,
    WorkflowEndedEvent,
    WorkflowResult,
    WorkflowStartedEvent,
    next_task_attempts,
    read_outcome,
    workflow_state,
)
from torchmuster.workflow.task.setup import GroupOrder

MAX_GROUPS_AT_ONCE = 64
MAX_HEAD_RESTARTS = 2
MAX_SHOWN_GROUPS = 20  # with more groups, only failures get a line each
REPORT_WAIT_S = 4.0
_TICK_S = 0.1
_POLL_S = 0.02
_END_LIMIT_S = 15.0  # to end processes that a head has left

Hear = Callable[[messages.Message], None]  # takes the messages of a group's head


def link_reused_outputs(plan: WorkflowPlan, run_dir: RunDir) -> None:
    """Link the outputs of reused groups' tasks from the earlier run.

    Raises:
        OSError: A link can't be made.
    """
    for name, folder in plan.reused.items():
        earlier = RunDir(folder)
        for task in plan.group(name).tasks:
            os.makedirs(run_dir.task_folder(task.name), exist_ok=True)
            output = os.path.realpath(earlier.task_output(task.name))
            if os.path.isdir(output) and not os.path.lexists(run_dir.task_output(task.name)):
                os.symlink(output, run_dir.task_output(task.name))


def create_workflow_dir(plan: WorkflowPlan, source: str, rendered: str) -> RunDir:
    """Make the run directory of a workflow.

    Raises:
        UsageError: The run directory exists already.
        RunDirectoryError: It can't be made or written.
    """

    def fill(run_dir: RunDir) -> None:
        for path, text in ((run_dir.spec, source), (run_dir.rendered, rendered)):
            with open(path, "w") as file:
                file.write(text)
        atomic.write_json(run_dir.workflow, codec.to_plain(plan))
        for task in (task for group in plan.groups for task in group.tasks):
            os.makedirs(run_dir.task_folder(task.name), exist_ok=True)

    run_dir = make_dir(os.path.join(runs_dir(), plan.run_id), fill)
    note_origin(run_dir, None)
    return run_dir


class GroupProcess:
    """Starts the head of a group, a process on this machine, and follows it to its end."""

    def __init__(
        self,
        run_dir: RunDir,
        group: str,
        stops: Stops,
        policy: OwnerPolicy,
        hear: Hear,
        say: Callable[[str], None],
        record: RecordWriter,
    ) -> None:
        self._run_dir = run_dir
        self._group = group
        self._hear = hear
        self._record = record
        self._lifeline = os.pipe2(os.O_CLOEXEC)
        self._child: proc.Child | None = None
        self._head = HeadFollower(
            run_dir,
            policy=policy,
            stops=stops,
            state=self._state,
            kill=self.kill,
            hear=self._take,
            say=say,
        )

    @property
    def pid(self) -> int:
        """Return the pid of the head; 0 before its start."""
        return self._child.pid if self._child is not None else 0

    async def start(self, start: GroupInput) -> tuple[str, int]:
        """Start the head; return its (host, port).

        Raises:
            OSError: The files that the head reads can't be written.
        """
        log = await asyncio.to_thread(self._write_start, start)
        listening = bind("127.0.0.1", 0)
        host, port = listening.getsockname()[:2]
        with listening:
            order = GroupOrder(
                run_dir=self._run_dir.path,
                group=self._group,
                listen_fd=listening.fileno(),
                lifeline_fd=self._lifeline[0],
            )
            try:
                self._child = proc.start(
                    proc.node_program("group", *codec.to_arguments(order)),
                    stdout=log,
                    stderr=log,
                    pass_fds=[order.listen_fd, order.lifeline_fd],
                )
            finally:
                os.close(log)
        head = self._run_dir.group(self._group).head
        self._record.replace(head, {"host": host, "port": port}, mode=0o600)
        return str(host), int(port)

    def _write_start(self, start: GroupInput) -> int:
        """Write the head's input file; return the descriptor of its open log."""
        folder = self._run_dir.group(self._group)
        os.makedirs(folder.path, exist_ok=True)
        atomic.write_json(folder.start, codec.to_plain(start))
        path = self._run_dir.agent_log(f"group-{self._group}")
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    async def follow(self, address: tuple[str, int]) -> GroupOutcome | None:
        """Pass on the head's messages until its end; return its result, None if it left none."""
        await self._head.follow(address, self._wait_for_end)
        await self._wait_for_end()  # a silent head has been killed
        return read_outcome(self._run_dir, self._group)

    def _take(self, message: messages.Message) -> bool:
        self._hear(message)
        return True

    def _state(self) -> str:
        facts = proc.read_process(self.pid)
        return facts.state if facts is not None else "X"  # as /proc shows a dead process

    async def _wait_for_end(self) -> str:
        while self._child is not None and self._child.poll() is None:
            await asyncio.sleep(_POLL_S)
        return "it has ended"

    def send_stop(self) -> None:
        """Ask the head to stop its group."""
        self._head.send_stop()

    def kill(self) -> None:
        """SIGKILL the head; its children become ours, and `WorkflowOwner._end_orphans` ends them."""
        if self._child is not None:
            self._child.send_signal(9)

    def close(self) -> None:
        """Close the lifeline, so that a head that still runs ends."""
        for fd in self._lifeline:
            os.close(fd)


class GroupConductor(Protocol):
    """Conducts one group: a process of this machine, or Jobs of a cluster."""

    @property
    def pid(self) -> int:
        """Return the pid of its process on this machine; 0 without one."""

    async def start(self, start: GroupInput) -> tuple[str, int]:
        """Start it; return the (host, port) of its head, if known."""

    async def follow(self, address: tuple[str, int]) -> GroupOutcome | None:
        """Pass on its messages until its end; return its result, None if it left none."""

    def send_stop(self) -> None:
        """Ask it to stop its group."""

    def kill(self) -> None:
        """End it at once."""

    def close(self) -> None:
        """Release its resources."""


class GroupRunner(Protocol):
    """Runs groups elsewhere than on this machine, with resources that it manages itself."""

    def conductor(self, plan: WorkflowPlan, group: GroupPlan, hear: Hear) -> GroupConductor:
        """Return the conductor of a group; `hear` receives its messages."""


@dataclass(slots=True)
class TaskDisplay:
    """Shows tasks by a `TerminalVoice`, which knows ranks only: each task gets a number."""

    voice: TerminalVoice
    _numbers: dict[str, int] = field(default_factory=dict)

    def say(self, sentence: str) -> None:
        """Show a sentence from muster itself."""
        self.voice.say(sentence)

    def show_task(self, task: str, stream: int, text: str, left_out: int) -> None:
        """Show output of a task."""
        number = self._numbers.setdefault(task, len(self._numbers))
        self.voice.name_rank(number, task)
        self.voice.show(number, stream, text, left_out)


@dataclass(slots=True)
class _Group:
    plan: GroupPlan
    policy: OwnerPolicy
    state: State = State.SUBMITTING
    why: str | None = None
    outcome: GroupOutcome | None = None
    refusal: Report | None = None  # why it could not start
    announced_outcome: GroupOutcome | None = (
        None  # the head's message, in case it can't write the result
    )
    process: GroupConductor | None = None
    scheduling_since: float | None = None
    running_since: float | None = None
    said_waiting: bool = False
    lead_is_over: bool = False
    running: asyncio.Task[None] | None = None


class WorkflowOwner:
    """Conducts a workflow: starts its groups, follows them, writes the result."""

    def __init__(
        self,
        plan: WorkflowPlan,
        run_dir: RunDir,
        machine: Machine,
        display: TaskDisplay,
        hosts: HostCapacity | None = None,
        elsewhere: GroupRunner | None = None,
    ) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._hosts = hosts
        self._elsewhere = elsewhere
        self._capacity: Capacity | HostCapacity = Capacity(machine) if hosts is None else hosts
        self._display = display
        self._record = RecordWriter(run_dir, display.say)
        self._stops = Stops(may_save=lambda: True)
        self._groups = {group.name: _Group(group, self._policy(group)) for group in plan.groups}
        self._changed = asyncio.Event()
        self._started_at = time.monotonic()

    def _policy(self, group: GroupPlan) -> OwnerPolicy:
        # A cancelled group may upload its outputs for a long time: only silence ends it.
        return OwnerPolicy(
            f"group {group.name}", RestartBudget(MAX_HEAD_RESTARTS), self._stops.requests
        )

    async def run(self, early: EarlyStop | None = None) -> WorkflowResult:
        """Conduct the workflow to its end and return its result.

        Args:
            early: Has recorded stop signals that came before the owner listens.
        """
        async with self._record:
            if self._runs_locally:
                proc.become_subreaper()
            self._stops.listen(self._take_stop, early)
            groups = tuple(self._groups)
            self._record.event(WorkflowStartedEvent(run_id=self._plan.run_id, groups=groups))
            link_reused_outputs(self._plan, self._run_dir)
            for name, folder in self._plan.reused.items():
                why = f"taken from {os.path.basename(folder)}"
                self._enter(self._groups[name], State.COMPLETED, why)
            try:
                while not all(group.state.is_final for group in self._groups.values()):
                    self._advance()
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_TICK_S):
                            await self._changed.wait()
                return self._conclude()
            finally:
                await self._end_everything()

    @property
    def _runs_locally(self) -> bool:
        """Return whether agents run on this machine: then a lost head's children become ours."""
        return self._hosts is None and self._elsewhere is None

    # Starting groups.

    def _advance(self) -> None:
        for group in self._groups.values():
            if group.running is not None and group.running.done():
                group.running.result()  # raises a bug of ours, which must end the workflow
            if group.state in (State.SUBMITTING, State.WAITING):
                self._consider(group)
            if group.state is State.SCHEDULING and group.running is None:
                self._try_start(group)

    def _consider(self, group: _Group) -> None:
        upstream = [self._groups[name] for name in group.plan.after]
        failed = [g for g in upstream if g.state.is_failed]
        if self._stops.count:
            self._enter(group, State.FAILED_CANCELED, "stopped before it began")
        elif failed:
            names = ", ".join(f"{g.plan.name} ({g.state.value})" for g in failed)
            self._enter(group, State.FAILED_UPSTREAM, f"it needs the output of {names}")
        elif all(g.state is State.COMPLETED for g in upstream):
            group.scheduling_since = time.monotonic()
            self._enter(group, State.SCHEDULING, None)
        else:
            open_ones = [g.plan.name for g in upstream if not g.state.is_final]
            self._enter(group, State.WAITING, f"waits for the outputs of {', '.join(open_ones)}")

    def _try_start(self, group: _Group) -> None:
        now = time.monotonic()
        waited_s = now - (group.scheduling_since or now)
        limit_s = group.plan.queue_timeout_s
        if self._stops.count:
            self._enter(group, State.FAILED_CANCELED, "stopped before it began")
            return
        if limit_s is not None and waited_s > limit_s:
            why = f"it waited longer than its queue_timeout of {limit_s:g} s"
            self._enter(group, State.FAILED_QUEUE_TIMEOUT, why)
            return
        begun = [g.running for g in self._groups.values() if g.running is not None]
        given = None
        if sum(not running.done() for running in begun) < MAX_GROUPS_AT_ONCE:
            # A cluster has its own queues.
            given = self._capacity.try_take(group.plan) if self._elsewhere is None else {}
        if given is not None:
            group.running = asyncio.create_task(self._run_group(group, given))
            return
        group.why = self._capacity.why_waiting(group.plan)
        if waited_s > REPORT_WAIT_S and not group.said_waiting:
            group.said_waiting = True
            left = f"; {limit_s - waited_s:.0f} s left" if limit_s is not None else ""
            self._record.event(GroupWaitsEvent(group=group.plan.name, text=group.why or ""))
            if len(self._groups) <= MAX_SHOWN_GROUPS:
                self._display.say(f"group {group.plan.name} {group.why}{left}")

    # One group.

    async def _run_group(self, group: _Group, gpus: dict[str, list[str]]) -> None:
        try:
            while True:
                events = self._run_dir.group(group.plan.name).events
                now, hosts = time.monotonic(), self._hosts
                start = GroupInput(
                    gpus={task: tuple(given) for task, given in gpus.items()},
                    first_attempts=next_task_attempts(events) if group.policy.lives.lost else {},
                    ran_s=now - (group.running_since or now),
                    broker=hosts.broker if hosts is not None else None,
                    nodes=hosts.nodes_of(group.plan.name) if hosts is not None else None,
                )
                await self._run_one_head(group, start)
                follows = group.policy.after_loss(has_result=group.outcome is not None)
                if follows is not AfterLoss.AGAIN:
                    break
                self._record.event(HeadLostEvent(group=group.plan.name))
                name = group.plan.name
                self._display.say(f"the head of group {name} was lost; it is started again")
            self._end_group(group)
        except MusterError as error:
            group.refusal = report_of_error(error)
            self._enter(group, State.FAILED_START_ERROR, error.what)
        except OSError as error:  # e.g. a full disk: the group still needs a final state
            where = f" ({error.filename})" if error.filename else ""
            why = f"its files can't be written{where}: {error.strerror}"
            self._enter(group, State.FAILED_START_ERROR, why)
        finally:
            if self._elsewhere is None:
                self._capacity.give_back(group.plan.name)
            group.process = None
            self._changed.set()

    async def _run_one_head(self, group: _Group, start: GroupInput) -> None:
        process = self._conductor(group)
        group.process = process
        try:
            address = await process.start(start)
            group.outcome = await process.follow(address) or group.announced_outcome
        finally:
            process.close()
            await self._end_orphans()

    def _conductor(self, group: _Group) -> GroupConductor:
        def hear(message: messages.Message) -> None:
            self._hear(group, message)

        if self._elsewhere is not None:
            return self._elsewhere.conductor(self._plan, group.plan, hear)
        name = group.plan.name
        stops, say = self._stops, self._display.say
        return GroupProcess(self._run_dir, name, stops, group.policy, hear, say, self._record)

    async def _end_orphans(self) -> None:
        """End the processes that a lost head has left here; on ssh hosts they end by themselves."""
        if not self._runs_locally:  # our children are ssh, its master process, or kubectl
            return
        deadline = time.monotonic() + _END_LIMIT_S
        while proc.end_children(self._heads()) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)  # meanwhile other groups start heads

    def _heads(self) -> frozenset[int]:
        living = [g.process.pid for g in self._groups.values() if g.process is not None]
        return frozenset(pid for pid in living if pid)

    def _end_group(self, group: _Group) -> None:
        if group.outcome is None:
            state, why = State.FAILED_SERVER_ERROR, "the head of the group was lost"
            if self._stops.count:
                state, why = State.FAILED_CANCELED, "the workflow was stopped"
            log = self._run_dir.agent_log(f"group-{group.plan.name}")
            self._enter(group, state, f"{why}; its log is {log}")
            return
        report = group.outcome.report
        self._enter(group, group.outcome.state, report.error if report is not None else None)

    def _hear(self, group: _Group, message: messages.Message) -> None:
        match message:
            case task_messages.TaskOutput(task=task, stream=stream, text=text):
                self._display.show_task(task, stream, text, message.dropped_lines)
            case messages.Event(name=name, fields=fields):
                self._hear_event(group, event_of(name, fields))

    def _hear_event(self, group: _Group, event: RecordEvent | None) -> None:
        match event:
            case TaskStateEvent():
                self._show_task_state(group, event)
            case GroupStateEvent():
                state = State(event.state)
                if state is State.RUNNING and group.running_since is None:
                    group.running_since = time.monotonic()
                if not state.is_final and group.state.may_become(state):
                    self._enter(group, state, None)
            case GroupWaitsEvent(text=text):
                group.why = text
                self._display.say(f"group {group.plan.name}: {text}")
            case GroupEndedEvent(outcome=outcome):
                group.announced_outcome = outcome
            case NoticeEvent(text=text):
                self._display.say(text)

    def _show_task_state(self, group: _Group, event: TaskStateEvent) -> None:
        """Show retries and failures of tasks; the record has the other changes of state."""
        state, task, why = State(event.state), event.task, event.why
        if task == group.plan.lead.name:
            group.lead_is_over = state.is_final
        if state is State.RESCHEDULED:
            self._display.say(f"{task}: {why}")
        elif state.is_failed and len(group.plan.tasks) > 1:
            note = ""
            counts = group.plan.lead.name == task or not group.plan.ignore_nonlead
            if not counts and state is State.FAILED and not group.lead_is_over:
                note = f"; the group continues until its lead {group.plan.lead.name} ends"
            self._display.say(f"{task} is {state.value}: {why}{note}")

    def _enter(self, group: _Group, state: State, why: str | None) -> None:
        if state is group.state and why == group.why:
            return
        changed = state is not group.state
        group.state, group.why = state, why
        self._record.event(GroupStateEvent(group=group.plan.name, state=state.value, why=why))
        worth_a_line = state is not State.SCHEDULING and len(self._groups) <= MAX_SHOWN_GROUPS
        if changed and (worth_a_line or state.is_failed):
            has_report = group.outcome is not None and group.outcome.report is not None
            shown = None if has_report else why  # the end shows the report itself
            self._display.say(f"group {group.plan.name} {_words_of(state, shown)}")
        self._changed.set()

    # Signals.

    def _take_stop(self) -> None:
        if self._stops.count == 1:
            grace_s = self._plan.grace_s
            self._display.say(
                f"stopping: SIGTERM to all commands, SIGKILL after {grace_s:g} s"
                " (Ctrl-C again for SIGKILL at once)"
            )
        for group in self._groups.values():
            if group.process is not None:
                if self._stops.count > 2:
                    group.process.kill()
                else:
                    group.process.send_stop()
        self._changed.set()

    # The end.

    def _conclude(self) -> WorkflowResult:
        states = {name: group.state for name, group in self._groups.items()}
        state = workflow_state(states.values())
        outcomes = [g.outcome for g in self._groups.values() if g.outcome is not None]
        code = 0
        if state.is_failed:
            code = next((o.exit_code for o in outcomes if o.state.is_failed), 1) or 1
        if self._stops.count:
            code = 128 + self._stops.signum
        result = WorkflowResult(
            run_id=self._plan.run_id,
            state=state,
            exit_code=code,
            elapsed_s=time.monotonic() - self._started_at,
            groups={name: state.value for name, state in states.items()},
            reports=tuple(self._reports()),
        )
        self._record.event(WorkflowEndedEvent(state=state.value, exit_code=code))
        self._record.replace(self._run_dir.result, codec.to_plain(result))
        return result

    def _reports(self) -> list[Report]:
        reports: list[Report] = []
        for group in self._groups.values():
            if not group.state.is_failed or group.state is State.FAILED_UPSTREAM:
                continue
            if group.outcome is not None and group.outcome.report is not None:
                reports.append(group.outcome.report)
            elif group.state is not State.FAILED_CANCELED:
                error = f"group {group.plan.name} is {group.state.value}: {group.why}"
                known = group.refusal or Report(error="")
                reports.append(replace(known, error=error))
        return reports

    async def _end_everything(self) -> None:
        running = [g.running for g in self._groups.values() if g.running is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        deadline = time.monotonic() + _END_LIMIT_S
        while self._runs_locally and proc.end_children() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def _words_of(state: State, why: str | None) -> str:
    words = {
        State.WAITING: "waits",
        State.INITIALIZING: "starts",
        State.RUNNING: "runs",
        State.COMPLETED: "has completed",
    }
    text = words.get(state, f"is {state.value}")
    if state is State.WAITING and why:
        return why
    return f"{text}: {why}" if why else text


def own_workflow(
    run_dir: RunDir,
    voice: TerminalVoice,
    hosts: HostCapacity | None = None,
    elsewhere: GroupRunner | None = None,
) -> WorkflowResult:
    """Run a prepared workflow to its end: here, on ssh hosts, or elsewhere.

    Raises:
        RunDirectoryError: The plan can't be read.
    """
    early = EarlyStop()
    plan = read_workflow(run_dir)
    if plan is None:
        raise RunDirectoryError("the plan of the workflow can't be read", where=run_dir.workflow)
    note = note_on_session(may_detach=hosts is None)
    if note is not None:
        voice.say(note)
    machine = this_machine(run_dir.path, visible_gpus())
    owner = WorkflowOwner(plan, run_dir, machine, TaskDisplay(voice), hosts, elsewhere)
    return asyncio.run(owner.run(early))


def own_in_background(run_dir: RunDir) -> int:
    """Own a prepared workflow to its end, here or on its cluster; return its exit code."""
    voice = TerminalVoice(prefix_always=True)
    voice.start()
    places: Callable[[RunDir, TerminalVoice], GroupRunner | None] | None = None
    if os.path.exists(run_dir.site):  # else it runs on this machine, without an import
        places = plugs.find("workflow_places", "cluster")
    elsewhere = places(run_dir, voice) if places is not None else None
    result = own_workflow(run_dir, voice, elsewhere=elsewhere)
    voice.flush(5.0)
    return result.exit_code
