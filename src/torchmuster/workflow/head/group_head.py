"""The program `group`, the head of a group: it reports agents' messages to `GroupPolicy` and carries out its actions.

When tasks run on ssh hosts, the head still runs here, and starts a proxy for each remote agent
(`launcher/node/remote/proxy.py`).
"""

import asyncio
import glob
import heapq
import itertools
import json
import os
import random
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.head.head import SAY_EVERY_S, Head, HeadClient
from torchmuster.core.model import codec, events
from torchmuster.core.model.codec import from_arguments, to_arguments
from torchmuster.core.model.lease import SILENT_S, is_given_up
from torchmuster.core.model.text import few_of
from torchmuster.core.model.verdict import Report
from torchmuster.core.net import messages
from torchmuster.core.net.address import read_secret
from torchmuster.core.net.channel import Channel, HandshakeError
from torchmuster.core.net.listener import Listener
from torchmuster.errors import RunDirectoryError
from torchmuster.launcher.head.parts import ExecRelay
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.net.remote_messages import StartTask
from torchmuster.launcher.node.remote.proxy import proxy_argv
from torchmuster.workflow import record
from torchmuster.workflow.head import group_policy as gang
from torchmuster.workflow.head import task_messages
from torchmuster.workflow.head.barriers import Barriers
from torchmuster.workflow.head.group_policy import Failure, GroupPolicy, TaskPhase
from torchmuster.workflow.plan import GroupInput, GroupNodes, GroupPlan, TaskNetwork, WorkflowPlan
from torchmuster.workflow.record import (
    FailureFacts,
    GroupOutcome,
    State,
    TaskOutcome,
    explain_task_failure,
)
from torchmuster.workflow.sandbox.container import remove_containers
from torchmuster.workflow.sandbox.network import PrivateNetwork
from torchmuster.workflow.sandbox.place import clear_views
from torchmuster.workflow.task.setup import GroupOrder, TaskOrder
from torchmuster.workflow.tokens import find_tokens

TICK_S = 0.25
_START_LIMIT_S = 120.0
_START_SLICE_S = 0.05  # else a start of hundreds of agents delays their messages
_FLUSH_S = 5.0
_MAX_EARLIER = 4
_NUM_PORT_CANDIDATES = 256

Wrap = Callable[[TaskOrder], list[str] | None]

# Ports: `{{port}}` and `{{port:NAME}}` resolve to the same numbers in all tasks of a group.


class Timers:
    """Actions to run later, by the monotonic clock."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Run an action after so many seconds; at once if there are none."""
        if after_s <= 0:
            action()
        else:
            heapq.heappush(self._waiting, (time.monotonic() + after_s, next(self._numbers), action))

    def next_s(self, most_s: float) -> float:
        """Return for how long nothing is due, at most `most_s`."""
        due = self._waiting[0][0] - time.monotonic() if self._waiting else most_s
        return max(0.0, min(due, most_s))

    def run(self, now: float) -> None:
        """Do what is due."""
        while self._waiting and self._waiting[0][0] <= now:
            heapq.heappop(self._waiting)[2]()


def choose_ports(
    plan: WorkflowPlan, group: GroupPlan, free: list[tuple[int, ...]]
) -> dict[str, int]:
    """Return a port for each port name in the group's texts.

    Args:
        plan: The plan of the workflow.
        group: The group.
        free: The candidates that each agent found free, without agents that found none.
    """
    names = port_names(group)
    if not names:
        return {}
    common = set.intersection(*map(set, free)) if free else set[int]()
    candidates = port_candidates(plan, group)
    chosen = [port for port in candidates if port in common] or list(candidates)
    return dict(zip(names, chosen, strict=False))


def port_names(group: GroupPlan) -> list[str]:
    """Return the NAME of each `{{port:NAME}}` in a group's texts; `{{port}}` has the empty name."""
    names: dict[str, None] = {}
    for token in find_tokens(json.dumps(codec.to_plain(group), ensure_ascii=False)):
        if token.kind == "port":
            names[token.argument or ""] = None
    return list(names)


def port_candidates(plan: WorkflowPlan, group: GroupPlan) -> tuple[int, ...]:
    """Return the ports that all tasks of a group try, in this order; no ephemeral ports."""
    if not port_names(group):
        return ()
    low, high = _ephemeral_range()
    usable = [port for port in range(10240, 65536) if not low <= port <= high]
    # Seeded, because all tasks must get the same list.
    chooser = random.Random(f"{plan.uuid}/{group.name}")
    return tuple(chooser.sample(usable, min(_NUM_PORT_CANDIDATES, len(usable))))


def _ephemeral_range() -> tuple[int, int]:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = file.read().split()
            return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


def task_argv(order: TaskOrder) -> list[str]:
    """Return the command line of a task's agent."""
    return proc.node_program("task", *to_arguments(order))


@dataclass(slots=True)
class ProcessStarter:
    """Starts the agents of tasks as child processes, which run here or bring the agent elsewhere.

    Attributes:
        heads: Addresses of the group's head, which agents try in turn.
        keep: Pids of child processes that are not agents, and that `poll` must not end.
        wrap: Returns the command that starts a task's agent elsewhere; None to start it here.
    """

    run_dir: RunDir
    group: str
    heads: Sequence[tuple[str, int]]
    keep: frozenset[int] = frozenset()
    wrap: Wrap | None = None
    _children: list[tuple[str, int, proc.Child]] = field(default_factory=list)
    _lifeline: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_CLOEXEC))

    @property
    def has_agents(self) -> bool:
        """Return whether an agent still runs."""
        return bool(self._children)

    def start(self, task: str, attempt: int) -> None:
        """Start an agent."""
        order = TaskOrder(
            run_dir=self.run_dir.path,
            group=self.group,
            task=task,
            attempt=attempt,
            head=tuple(f"{host}:{port}" for host, port in self.heads),
        )
        elsewhere = self.wrap(order) if self.wrap is not None else None
        # A remote agent ends when it loses the head: a lifeline does not reach that far.
        if elsewhere is not None:
            child = proc.start(elsewhere)
        else:
            lifeline = self._lifeline[0]
            child = proc.start(task_argv(replace(order, lifeline_fd=lifeline)), pass_fds=[lifeline])
        self._children.append((task, attempt, child))

    def poll(self) -> list[tuple[str, int, str]]:
        """Return the agents that have ended, and end the processes that they left."""
        ended: list[tuple[str, int, str]] = []
        for entry in list(self._children):
            status = entry[2].poll()
            if status is not None:
                self._children.remove(entry)
                how = f"signal {-status}" if status < 0 else f"exit code {status}"
                ended.append((entry[0], entry[1], how))
        proc.end_children(self.keep.union(child.pid for _, _, child in self._children))
        return ended

    def kill(self, task: str) -> None:
        """SIGKILL a task's agents; `poll` reaps them and the processes that they started."""
        for name, _, child in self._children:
            if name == task:
                child.send_signal(signal.SIGKILL)

    def cut_lifeline(self) -> None:
        """Close the lifeline, so that the agents end themselves."""
        for fd in self._lifeline:
            os.close(fd)


@dataclass(slots=True)
class _Agent:
    """The agent of a task; `hello` names its first attempt, which retries in place follow."""

    channel: Channel
    heard_at: float
    hello: task_messages.TaskHello
    free_ports: tuple[int, ...] = ()

    @property
    def task(self) -> str:
        return self.hello.task


class GroupHead(Head[_Agent]):
    """The head of one group."""

    def __init__(
        self,
        plan: WorkflowPlan,
        group: GroupPlan,
        run_dir: RunDir,
        starter: ProcessStarter,
        disk: DiskWriter,
        start: GroupInput,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(disk, run_dir.group(group.name).events)
        self._plan = plan
        self._group = group
        self._run_dir = run_dir
        self._start = start
        self._notes = notes
        self._starter = starter
        self._gang = GroupPolicy(group, plan.grace_s, plan.backoff_s)
        self._barriers = Barriers(tuple(task.name for task in group.tasks))
        self._callers: dict[str, str] = {}  # at barriers: caller -> task
        self._execs = ExecRelay(self._task_of, self._send, self._why_no_exec)
        self._agents: dict[str, _Agent] = {}
        self._timers = Timers()
        self._outcomes: dict[str, TaskOutcome] = {}
        self._ends: dict[str, task_messages.TaskEnded | task_messages.TaskNotPrepared] = {}
        self._started_at = time.monotonic()
        self._running_since: float | None = None
        self._say_at = self._started_at + SAY_EVERY_S
        self._state: State | None = None
        self._leaving: set[tuple[str, int]] = set()
        self._to_start: deque[tuple[str, int]] = deque()
        self._started: dict[tuple[str, int], float] = {}
        self._chosen_ports: dict[str, int] = {}
        self._port_users: set[str] = set()
        self._hosts: dict[str, str] = {}  # ended tasks stay, so that `{{host:NAME}}` stays valid
        self._addresses: dict[str, str] = {}
        self._stop_why: str | None = None
        self._stop_asked_by: str | None = None

    # Calls from this process.

    def request_stop(self, who: str) -> None:
        """Stop the group as `muster cancel` does; for signals from a scheduler."""
        self._stop_asked_by = who

    def forward(self, signum: int) -> None:
        """Pass a scheduler's signal that its time limit is near on to the tasks' processes."""
        text = f"{signal.Signals(signum).name} goes to the tasks' processes"
        self.event(events.NoticeEvent(text=text))
        for agent in self._agents.values():
            agent.channel.send_nowait(messages.Forward(signum=signum))

    def refuse_stranger(self, peer: str, error: HandshakeError) -> None:
        """Log nothing about a caller without the key."""

    # The main loop.

    async def conduct(self) -> GroupOutcome:
        """Conduct the group to its end and return its outcome."""
        self.event(record.GroupStartedEvent(group=self._group.name))
        for note in self._notes:
            self.event(events.NoticeEvent(text=f"group {self._group.name}: {note}"))
        self._obey(self._gang.start(self._start.first_attempts))
        await self.run()
        outcome = self._conclude()
        await self._say_goodbye()
        return outcome

    @property
    def is_over(self) -> bool:
        """Return whether every task has ended for good."""
        return self._gang.is_over

    def patience_s(self) -> float:
        """Return the seconds to the next timer; 0 while an agent is to be started."""
        return 0.0 if self._to_start else self._timers.next_s(TICK_S)

    def advance(self) -> None:
        """Do the due work: stops, timers, starts, losses, barriers, time limits, notices."""
        now = time.monotonic()
        if self._stop_asked_by is not None:
            self._stop(State.FAILED_CANCELED, f"stopped by {self._stop_asked_by}")
            self._stop_asked_by = None
        self._timers.run(now)
        while self._to_start and time.monotonic() - now < _START_SLICE_S:
            self._start_agent(*self._to_start.popleft())
        for task, attempt, how in self._starter.poll():
            self._agent_ended(task, attempt, how)
        own_now = self.clock()
        self._lose_silent(own_now)
        for (task, _), since in list(self._started.items()):
            if own_now - since > _START_LIMIT_S:
                self._starter.kill(task)
        self._answer(self._barriers.tick(now))
        limit_s = self._group.exec_timeout_s
        ran_s = now - self._running_since if self._running_since is not None else 0.0
        if limit_s is not None and ran_s > limit_s and not self._gang.is_stopping:
            why = f"it ran longer than its exec_timeout of {limit_s:g} s"
            self._stop(State.FAILED_EXEC_TIMEOUT, why)
        if now >= self._say_at:
            self._say_at = now + SAY_EVERY_S
            self._report_waiting()

    def _lose_silent(self, now: float) -> None:
        for agent in list(self._agents.values()):
            silent_s, hello = now - agent.heard_at, agent.hello
            if silent_s <= SILENT_S:
                continue
            whose = (hello.boot_id, hello.network_id)
            state = proc.local_process_state(hello.pid, whose, self.own_ids)
            if is_given_up(silent_s, SILENT_S, state):
                agent.channel.abort()
                self._lose(agent.task, f"its agent has been silent for {silent_s:.0f} s")

    def _report_waiting(self) -> None:
        waits = self._gang.waits_for()
        if waits and self._gang.state in (State.RUNNING, State.INITIALIZING, State.SCHEDULING):
            limit_s, left = self._group.exec_timeout_s, ""
            if limit_s is not None and self._running_since is not None:
                left = f"; {limit_s - (time.monotonic() - self._running_since):.0f} s left"
            text = f"waiting for {few_of(waits, 8)}{left}"
            self.event(record.GroupWaitsEvent(group=self._group.name, text=text))

    # Incoming messages.

    def take_call(self, hello: messages.Message, channel: Channel) -> _Agent | None:
        """Accept an agent, or send it away if its attempt is old or its task is over."""
        if not isinstance(hello, task_messages.TaskHello):
            return None
        if (
            hello.task not in {task.name for task in self._group.tasks}
            or hello.task in self._agents
            or hello.attempt != self._gang.attempt(hello.task)
            or self._gang.phase(hello.task) is TaskPhase.OVER
        ):
            channel.send_nowait(task_messages.TaskLeave())
            return None
        agent = _Agent(channel, self.clock(), hello)
        boot_id, network_id = self.own_ids
        channel.send_nowait(
            task_messages.TaskWelcome(head_pid=os.getpid(), boot_id=boot_id, network_id=network_id)
        )
        self._agents[agent.task] = agent
        self._hosts[agent.task] = hello.host
        self._addresses[agent.task] = hello.address
        self._started.pop((agent.task, hello.attempt), None)
        self._obey(self._gang.joined(agent.task))
        return agent

    def take_loss(self, agent: _Agent, channel: Channel, why: str) -> None:
        """Handle the end of an agent's connection."""
        if self._agents.get(agent.task) is agent:
            self._lose(agent.task, why)

    def take_word(self, agent: _Agent, message: messages.Message) -> None:
        """Handle an agent's message; ignore it when the agent counts as lost."""
        task = agent.task
        if self._agents.get(task) is not agent:
            return
        match message:
            case task_messages.TaskDoing(text=text):
                self._gang.doing(task, text)
            case task_messages.TaskPrepared(attempt=attempt, free_ports=free):
                if attempt == self._gang.attempt(task):
                    agent.free_ports = free
                    self._obey(self._gang.prepared(task))
            case task_messages.TaskNotPrepared(state=state, why=why, code=code):
                self._ends[task] = message
                self._port_users.discard(task)
                self._obey(self._gang.could_not_prepare(task, State(state), why, code))
            case task_messages.TaskStarted(attempt=attempt, pid=pid):
                host = agent.hello.host
                self.event(record.TaskStartedEvent(task=task, attempt=attempt, pid=pid, host=host))
            case task_messages.TaskEnded(attempt=attempt, code=code, signum=signum):
                took_s = message.elapsed_s
                self.event(
                    record.TaskEndedEvent(task=task, attempt=attempt, code=code, elapsed_s=took_s)
                )
                self._ends[task] = message
                self._port_users.discard(task)
                self._obey(self._gang.ended(task, code=code, signum=signum))
            case task_messages.TaskUploaded(error=error, notes=notes, versions=versions):
                for note in notes:
                    self.event(events.NoticeEvent(text=f"{task}: {note}"))
                for version in versions:
                    self.event(record.DatasetVersionEvent(task=task, version=version))
                self._obey(self._gang.uploaded(task, error))
            case task_messages.TaskOutput():
                self.show(message)
            case messages.Notice(text=text):
                self.event(events.NoticeEvent(text=text))
            case task_messages.BarrierCall(caller_id=caller_id):
                self._callers[caller_id] = task
                self._answer(self._barriers.arrive(task, message, time.monotonic()))
            case task_messages.BarrierLeave(caller_id=caller_id):
                self._leave_barrier(caller_id)
            case _ if isinstance(message, part_messages.FromExecTask):
                self._execs.from_agent(task, message)

    def client_gone(self, client: HeadClient) -> None:
        """Handle the end of a client's connection."""
        super().client_gone(client)
        self._execs.client_gone(client.channel)

    def take_request(self, client: HeadClient, message: messages.Message) -> None:
        """Handle a client's request."""
        match message:
            case messages.Watch(owner=owner):
                self.watch(client, owner=owner)
            case messages.Stop(who=who, cause=cause, at_once=at_once):
                grace_s = 0.0 if at_once else None
                self._stop(State.FAILED_CANCELED, f"stopped by {who or cause.value}", grace_s)
            case _ if isinstance(message, part_messages.FromExecClient):
                self._execs.from_client(client.channel, message)

    def _task_of(self, word: str) -> str | None:
        return word if word in self._agents else None

    def _why_no_exec(self, task: str) -> tuple[str, str | None]:
        if task not in {one.name for one in self._group.tasks}:
            return f"the group {self._group.name} has no task `{task[:64]}`", None
        outcome = self._outcomes.get(task)
        state = outcome.state.value if outcome is not None else State.SCHEDULING.value
        return f"the task {task} does not run: it is {state}", outcome.why if outcome else None

    def _stop(self, state: State, why: str, grace_s: float | None = None) -> None:
        self._stop_why = self._stop_why or why
        self._obey(self._gang.stop(state, why, grace_s))

    def _agent_ended(self, task: str, attempt: int, how: str) -> None:
        """Handle the end of an agent's process; only one that never called counts as lost here."""
        self._leaving.discard((task, attempt))
        had_not_called = self._started.pop((task, attempt), None) is not None
        if had_not_called and attempt == self._gang.attempt(task):
            self._lose(task, f"its agent ended before it called ({how})")

    def _lose(self, task: str, why: str) -> None:
        self._agents.pop(task, None)
        self._port_users.discard(task)
        self._execs.agent_gone(task, why)
        if self._gang.phase(task) is TaskPhase.OVER:
            return
        for caller_id in [one for one, owner in self._callers.items() if owner == task]:
            self._leave_barrier(caller_id)  # a retry may call again
        self._starter.kill(task)
        self.event(record.AgentLostEvent(task=task, why=why))
        self._obey(self._gang.lost(task, why))

    # Carrying out actions.

    def _obey(self, orders: list[gang.Action]) -> None:
        for order in orders:
            self._carry_out(order)
        self._note_state()

    def _carry_out(self, order: gang.Action) -> None:
        task = order.task
        attempt = self._gang.attempt(task)
        match order:
            case gang.Tell():
                self._tell(order)
            case gang.StartAgent(attempt=number, after_s=after_s):
                self._timers.later(after_s, lambda: self._to_start.append((task, number)))
            case gang.StartCommand():
                self._send(task, self._begin_message(task, attempt))
            case gang.RetryInPlace(attempt=number, after_s=after_s):
                self._timers.later(
                    after_s, lambda: self._send(task, task_messages.TaskAgain(attempt=number))
                )
            case gang.StopCommand(grace_s=grace_s, after_s=after_s):
                stop = task_messages.TaskStop(attempt=attempt, grace_s=grace_s)
                self._timers.later(after_s, lambda: self._send(task, stop))
            case gang.UploadOutputs():
                succeeded = self._gang.is_succeeding(task)
                self._send(task, task_messages.TaskUpload(attempt=attempt, succeeded=succeeded))
            case gang.ReleaseAgent():
                self._release(task)

    def _start_agent(self, task: str, attempt: int) -> None:
        if self._gang.phase(task) is TaskPhase.OVER or self._gang.attempt(task) != attempt:
            return
        self._started[task, attempt] = self.clock()
        self._starter.start(task, attempt)

    def _release(self, task: str) -> None:
        agent = self._agents.pop(task, None)
        if agent is not None:
            self._leaving.add((task, agent.hello.attempt))
            agent.channel.send_nowait(task_messages.TaskLeave())
            self._execs.agent_gone(task, "the task has ended")
        if self._gang.phase(task) is TaskPhase.OVER:
            outcome = self._outcomes.get(task)
            how = outcome.state.value if outcome is not None else "ended"
            self._answer(self._barriers.end_member(task, f"it is {how}"))

    def _leave_barrier(self, caller_id: str) -> None:
        self._callers.pop(caller_id, None)
        self._barriers.leave(caller_id)

    def _answer(self, answers: Sequence[task_messages.BarrierAnswer]) -> None:
        for answer in answers:
            if (task := self._callers.get(answer.caller_id)) is not None:
                self._send(task, answer)

    def _send(self, task: str, message: messages.Message) -> None:
        agent = self._agents.get(task)
        if agent is not None:
            agent.channel.send_nowait(message)

    def _tell(self, order: gang.Tell) -> None:
        self._outcomes[order.task] = TaskOutcome(
            task=order.task,
            state=order.state,
            attempt=order.attempt,
            why=order.why,
            code=order.code,
        )
        self.event(
            record.TaskStateEvent(
                group=self._group.name,
                task=order.task,
                attempt=order.attempt,
                state=order.state.value,
                why=order.why,
                code=order.code,
            )
        )

    def _note_state(self) -> None:
        state = self._gang.state
        if state is self._state:
            return
        self._state = state
        if state is State.RUNNING and self._running_since is None:
            self._running_since = time.monotonic() - self._start.ran_s
        self.event(record.GroupStateEvent(group=self._group.name, state=state.value))

    def _begin_message(self, task: str, attempt: int) -> task_messages.TaskBegin:
        if not self._port_users:  # who begins beside others must get the ports that they have
            free = [agent.free_ports for agent in self._agents.values() if agent.free_ports]
            self._chosen_ports = choose_ports(self._plan, self._group, free)
        self._port_users.add(task)
        return task_messages.TaskBegin(
            attempt=attempt,
            hosts=dict(self._hosts),
            addresses=dict(self._addresses),
            ports=self._chosen_ports,
        )

    # The end.

    def _conclude(self) -> GroupOutcome:
        """Return the outcome of the group, and record it."""
        state = self._gang.state
        needs_report = state.is_failed and state is not State.FAILED_CANCELED
        outcome = GroupOutcome(
            group=self._group.name,
            state=state,
            exit_code=self._exit_code(state),
            elapsed_s=time.monotonic() - self._started_at,
            tasks=tuple(self._outcomes.values()),
            report=self._report() if needs_report else None,
        )
        path = self._run_dir.group(self._group.name).result
        self.disk.flush(5.0)
        try:
            atomic.write_json(path, codec.to_plain(outcome))
        except OSError as error:  # the event below still reaches the owner
            text = f"the result of group {self._group.name} could not be written: {error.strerror}"
            self.event(events.NoticeEvent(text=text))
        self.event(record.GroupEndedEvent(outcome=outcome))
        return outcome

    def _exit_code(self, state: State) -> int:
        if not state.is_failed:
            return 0
        if state is State.FAILED_CANCELED:
            return 128 + signal.SIGTERM
        failure, lead = self._gang.first_failure, self._outcomes.get(self._group.lead.name)
        found = failure.code if failure is not None else lead.code if lead else 1
        return found if found is not None and 0 < found < 256 else 1

    def _report(self) -> Report:
        failure = self._gang.first_failure
        if failure is None:
            why = self._stop_why or "it was stopped"
            error = f"group {self._group.name} ended as {self._gang.state.value}: {why}"
            return Report(error=error, because=self._earlier_failures())
        verdict = self._training_verdict(failure)
        if verdict is not None:
            return replace(verdict, error=f"task {failure.task} failed: {verdict.error}")
        report = explain_task_failure(self._facts(failure))
        return replace(report, because=(*report.because, *self._earlier_failures()))

    def _facts(self, failure: Failure) -> FailureFacts:
        end = self._ends.get(failure.task)
        ended = end if isinstance(end, task_messages.TaskEnded) else None
        refused = end if isinstance(end, task_messages.TaskNotPrepared) else None
        shared = self._plan.network is TaskNetwork.SHARED
        others = [t.name for t in self._group.tasks if t.name != failure.task] if shared else []
        return FailureFacts(
            group=self._group.name,
            task=failure.task,
            attempt=failure.attempt,
            why=failure.why,
            code=failure.code,
            tail=ended.tail if ended else refused.detail if refused else (),
            memory_evidence=ended.memory_evidence if ended else None,
            hint=refused.hint if refused else None,
            others=others,
            log=self._run_dir.task_log(self._group.name, failure.task, failure.attempt),
        )

    def _earlier_failures(self) -> tuple[str, ...]:
        """Return the ignored failures as possible causes: a lost peer can make the lead fail."""
        shown = self._gang.ignored[:_MAX_EARLIER]
        return tuple(f"{failure.task} had failed before: {failure.why}" for failure in shown)

    def _training_verdict(self, failure: Failure) -> Report | None:
        """Return the verdict of a training task's run, which names the rank and the line."""
        if self._group.task(failure.task).training is None or self._stop_why is not None:
            return None
        folder = self._run_dir.training_folder(failure.task, failure.attempt)
        for path in glob.glob(os.path.join(glob.escape(folder), "*", "result.json")):
            plain = atomic.read_json(path)
            try:
                return codec.from_plain(Report, (plain or {}).get("report"))
            except codec.CodecError:
                continue
        return None

    async def _say_goodbye(self) -> None:
        """Give agents a moment to leave by themselves, and clients the last event."""
        deadline = time.monotonic() + 5.0
        while self._leaving and time.monotonic() < deadline:
            for task, attempt, _ in self._starter.poll():
                self._leaving.discard((task, attempt))
            await asyncio.sleep(0.01)
        for client in self._watchers:
            await client.channel.close()


def main(arguments: list[str]) -> int:
    """Run the head of a group; return the group's exit code."""
    proc.become_subreaper()
    return asyncio.run(_run_head(from_arguments(GroupOrder, arguments)))


def read_plan(run_dir: RunDir) -> WorkflowPlan:
    """Read the plan of a workflow.

    Raises:
        RunDirectoryError: The plan can't be read.
    """
    try:
        return codec.from_plain(WorkflowPlan, atomic.read_json(run_dir.workflow))
    except codec.CodecError as error:
        raise RunDirectoryError(
            "the plan of the workflow can't be read", where=run_dir.workflow, why=str(error)
        ) from error


async def _run_head(order: GroupOrder) -> int:
    """Conduct a group whose head the owner started on this machine."""
    run_dir = RunDir(order.run_dir)
    plan = read_plan(run_dir)
    listening = socket.socket(fileno=order.listen_fd)
    listening.setblocking(False)
    host, port = listening.getsockname()[:2]
    network = _open_network(plan, run_dir, order.group)
    keep = frozenset([network.holder_pid]) if network is not None else frozenset()
    notes = (network.note,) if network is not None else ()
    start, wrap = read_start(run_dir, order.group), None
    if start.broker is not None and start.nodes is not None:
        # Training tasks read their hosts from this file.
        atomic.write_json(run_dir.group(order.group).nodes, codec.to_plain(start.nodes))
        wrap = _wrap_elsewhere(plan.group(order.group), start.broker, start.nodes, port)
    starter = ProcessStarter(run_dir, order.group, [(host, port)], keep, wrap)
    try:
        return await conduct_group(
            plan, run_dir, order.group, listening, starter, order.lifeline_fd, notes=notes
        )
    finally:
        remove_containers(plan.container, plan.run_id, order.group)
        if network is not None:
            network.close()


def read_start(run_dir: RunDir, group: str) -> GroupInput:
    """Read the owner's `GroupInput`; return an empty one when a job conducts the group."""
    return codec.from_plain(GroupInput, atomic.read_json(run_dir.group(group).start) or {})


def _wrap_elsewhere(group: GroupPlan, broker: str, nodes: GroupNodes, port: int) -> Wrap:
    """Return the function that gives the command of the proxy for an agent on an ssh host."""

    def wrap(order: TaskOrder) -> list[str]:
        asked = group.task(order.task)
        request = StartTask(
            host=nodes.tasks[order.task][0].name,
            group=group.name,
            task=order.task,
            attempt=order.attempt,
            port=port,
            # A training task's nodes, and a task's GPUs, are those of particular hosts.
            may_move=asked.training is None and not asked.resources.gpu,
        )
        return proxy_argv(broker, request)

    return wrap


async def conduct_group(
    plan: WorkflowPlan,
    run_dir: RunDir,
    group: str,
    listening: socket.socket,
    starter: ProcessStarter,
    lifeline_fd: int | None = None,
    *,
    notes: tuple[str, ...] = (),
    obeys_signals: bool = False,
    stopped_by: Callable[[], str] = lambda: "the scheduler",
) -> int:
    """Conduct a group to its end; return its exit code. With `obeys_signals`, SIGTERM stops it."""
    start = read_start(run_dir, group)
    disk = DiskWriter(root=run_dir.path)
    disk.start()
    head = GroupHead(plan, plan.group(group), run_dir, starter, disk, start, notes)
    secret = read_secret(run_dir.secret)
    listener = Listener(listening, (secret, None), head.serve, head.refuse_stranger)
    serving = asyncio.create_task(listener.serve())
    conducting = asyncio.create_task(head.conduct())
    end_with_lifeline(lifeline_fd, conducting)
    if obeys_signals:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, lambda: head.request_stop(stopped_by()))
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(signum, head.forward, int(signum))
    try:
        outcome = await conducting
        return outcome.exit_code
    except asyncio.CancelledError:
        return 7
    finally:
        serving.cancel()
        starter.cut_lifeline()
        await _end_agents(starter)
        for task in plan.group(group).tasks:
            clear_views(run_dir.task_folder(task.name))
        disk.flush(_FLUSH_S)


def _open_network(plan: WorkflowPlan, run_dir: RunDir, group: str) -> PrivateNetwork | None:
    """Make the private network of a group, and write each task's part of it for the agents."""
    if plan.network is not TaskNetwork.PRIVATE:
        return None
    network = PrivateNetwork.open([task.name for task in plan.group(group).tasks])
    resolver = network.resolver_file()
    parts = {
        name: replace(part, hosts=network.hosts_file(name), resolver=resolver)
        for name, part in network.tasks.items()
    }
    atomic.write_json(run_dir.group(group).network, codec.to_plain(parts), mode=0o600)
    return network


async def _end_agents(starter: ProcessStarter) -> None:
    deadline = time.monotonic() + 5.0
    while starter.has_agents and time.monotonic() < deadline:
        starter.poll()
        await asyncio.sleep(0.01)
    while proc.end_children(starter.keep) and time.monotonic() < deadline + 5.0:
        await asyncio.sleep(0.01)


def end_with_lifeline(fd: int | None, task: "asyncio.Task[Any]") -> None:
    """Cancel an asyncio task when the lifeline reaches its end of file."""
    if fd is None:
        return
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(fd)
        task.cancel()

    loop.add_reader(fd, end)
