"""The head of a workflow's group: hears its tasks' agents, lets `GroupPolicy` decide, carries out what follows."""

import asyncio
import glob
import heapq
import itertools
import json
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torchmuster import proc
from torchmuster.files import atomic
from torchmuster.files.disk import DiskWriter
from torchmuster.files.layout import RunDir
from torchmuster.head import group_policy as gang
from torchmuster.head.barriers import Barriers
from torchmuster.head.exec_relay import ExecRelay
from torchmuster.head.group_policy import GroupPolicy, TaskPhase
from torchmuster.head.head import SAY_EVERY_S, Head, HeadClient
from torchmuster.model import codec
from torchmuster.model.lease import SILENT_S, is_given_up
from torchmuster.model.outcome import (
    FailureFacts,
    GroupOutcome,
    TaskOutcome,
    explain_task_failure,
)
from torchmuster.model.states import State
from torchmuster.model.tokens import find_tokens
from torchmuster.model.verdict import Report
from torchmuster.model.workflow import GroupPlan, TaskNetwork, WorkflowPlan
from torchmuster.net import messages
from torchmuster.net.channel import Channel
from torchmuster.net.handshake import HandshakeError

TICK_S = 0.25
_NUM_PORT_CANDIDATES = 256
_START_LIMIT_S = 120.0
_START_SLICE_S = 0.05  # starting hundreds of agents in one go would leave the first ones unheard


class TaskStarter(Protocol):
    """Starts the agents of tasks: on this machine, or through a scheduler."""

    def start(self, task: str, attempt: int) -> None:
        """Start an agent for a task."""

    def poll(self) -> list[tuple[str, int, str]]:
        """Return the agents that have ended: (task, the attempt that it was started for, how)."""

    def kill(self, task: str) -> None:
        """SIGKILL a task's agent."""


@dataclass(slots=True)
class _Agent:
    """The agent of a task; `hello` names the attempt of its start: restarts in place come after it."""

    channel: Channel
    heard_at: float
    hello: messages.TaskHello
    free_ports: tuple[int, ...] = ()

    @property
    def task(self) -> str:
        return self.hello.task


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeadOptions:
    """What the head of a group is given.

    Attributes:
        first_attempts: Not 0 for the tasks of a group whose head was lost.
        ran_s: How long the group ran under an earlier head: its time limit goes on.
    """

    plan: WorkflowPlan
    group: GroupPlan
    run_dir: RunDir
    first_attempts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ran_s: float = 0.0


class GroupHead(Head[_Agent]):
    """Conducts one group."""

    def __init__(self, options: GroupHeadOptions, starter: TaskStarter, disk: DiskWriter) -> None:
        super().__init__(disk, options.run_dir.group(options.group.name).events)
        self._options = options
        self._group = options.group
        self._starter = starter
        self._gang = GroupPolicy(options.group, options.plan.grace_s, options.plan.backoff_s)
        self._barriers = Barriers(tuple(task.name for task in options.group.tasks))
        self._execs = ExecRelay(self._send_exec, self._why_no_exec)
        self._agents: dict[str, _Agent] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_ids = itertools.count()
        self._outcomes: dict[str, TaskOutcome] = {}
        self._ends: dict[str, messages.TaskEnded | messages.TaskNotPrepared] = {}
        self._callers: dict[str, str] = {}
        self._started_at = time.monotonic()
        self._running_since: float | None = None
        self._say_at = self._started_at + SAY_EVERY_S
        self._state: State | None = None
        self._leaving: set[tuple[str, int]] = set()
        self._to_start: deque[tuple[str, int]] = deque()
        self._started: dict[tuple[str, int], float] = {}
        self._chosen_ports: dict[str, int] = {}
        self._port_users: set[str] = set()
        self._hosts: dict[
            str, str
        ] = {}  # also of tasks that have ended: `{{host:NAME}}` stays valid
        self._addresses: dict[str, str] = {}
        self._stop_why: str | None = None
        self._stop_asked_by: str | None = None

    # What others in this process ask.

    def request_stop(self, who: str) -> None:
        """Stop the group as `muster cancel` does: for signals of a scheduler."""
        self._stop_asked_by = who

    def forward(self, signum: int) -> None:
        """Pass a signal on to what catches it: the scheduler's word that the time ends soon."""
        self.event("notice", text=f"{signal.Signals(signum).name} goes to the tasks' processes")
        for agent in self._agents.values():
            agent.channel.send_nowait(messages.Forward(signum=signum))

    def refuse_stranger(self, peer: str, error: HandshakeError) -> None:
        """Note nothing: who has no key gets no line of ours."""

    # The one loop.

    async def conduct(self) -> GroupOutcome:
        """Conduct the group to its end and return how it ended."""
        self.event("group_started", group=self._group.name)
        for note in self._options.notes:
            self.event("notice", text=f"group {self._group.name}: {note}")
        self._obey(self._gang.start(self._options.first_attempts))
        await self.run()
        outcome = self._conclude()
        await self._say_goodbye()
        return outcome

    @property
    def is_over(self) -> bool:
        """Say whether every task has ended for good."""
        return self._gang.is_over

    def patience_s(self) -> float:
        """Return when the next timer ends, or an agent has to be started."""
        if self._to_start:
            return 0.0
        if not self._timers:
            return TICK_S
        return max(0.0, min(TICK_S, self._timers[0][0] - time.monotonic()))

    def advance(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if self._stop_asked_by is not None:
            self._stop(State.FAILED_CANCELED, f"stopped by {self._stop_asked_by}")
            self._stop_asked_by = None
        while self._timers and self._timers[0][0] <= now:
            _, _, action = heapq.heappop(self._timers)
            action()
        while self._to_start and time.monotonic() - now < _START_SLICE_S:
            self._start_agent(*self._to_start.popleft())
        for task, attempt, how in self._starter.poll():
            self._agent_ended(task, attempt, how)
        own_now = self.clock()
        self._lose_silent(own_now)
        for (task, _), since in list(self._started.items()):
            if own_now - since > _START_LIMIT_S:
                self._starter.kill(task)
        self._answer_barriers(self._barriers.tick(now))
        limit_s = self._group.exec_timeout_s
        ran_s = now - self._running_since if self._running_since is not None else 0.0
        if limit_s is not None and ran_s > limit_s and not self._gang.is_stopping:
            why = f"it ran longer than its exec_timeout of {limit_s:g} s"
            self._stop(State.FAILED_EXEC_TIMEOUT, why)
        if now >= self._say_at:
            self._say_at = now + SAY_EVERY_S
            self._say_waits()

    def _lose_silent(self, now: float) -> None:
        for agent in list(self._agents.values()):
            silent_s = now - agent.heard_at
            if silent_s > SILENT_S and is_given_up(silent_s, SILENT_S, self._state_of(agent)):
                agent.channel.abort()
                self._lose(agent.task, f"its agent has been silent for {silent_s:.0f} s")

    def _state_of(self, agent: _Agent) -> str | None:
        whose = (agent.hello.boot_id, agent.hello.network_id)
        return proc.state_beside(agent.hello.pid, whose, self.own_ids)

    def _say_waits(self) -> None:
        waits = self._gang.waits_for()
        if waits and self._gang.state in (State.RUNNING, State.INITIALIZING, State.SCHEDULING):
            what = ", ".join(waits[:8]) + (f" and {len(waits) - 8} more" if len(waits) > 8 else "")
            limit_s = self._group.exec_timeout_s
            left = ""
            if limit_s is not None and self._running_since is not None:
                left = f"; {limit_s - (time.monotonic() - self._running_since):.0f} s left"
            self.event("group_waits", group=self._group.name, text=f"waiting for {what}{left}")

    def _later(self, after_s: float, action: Callable[[], None]) -> None:
        if after_s <= 0:
            action()
            return
        entry = (time.monotonic() + after_s, next(self._timer_ids), action)
        heapq.heappush(self._timers, entry)

    # What comes in.

    def take_call(self, hello: messages.Message, channel: Channel) -> _Agent | None:
        """Take an agent in, or let it leave: one of an earlier attempt, or of a task that is over."""
        if not isinstance(hello, messages.TaskHello):
            return None
        known = {task.name for task in self._group.tasks}
        if (
            hello.task not in known
            or hello.task in self._agents
            or hello.attempt != self._gang.attempt(hello.task)
            or self._gang.phase(hello.task) is TaskPhase.OVER
        ):
            channel.send_nowait(messages.TaskLeave())
            return None
        agent = _Agent(channel, self.clock(), hello)
        boot_id, network_id = self.own_ids
        channel.send_nowait(
            messages.TaskWelcome(head_pid=os.getpid(), boot_id=boot_id, network_id=network_id)
        )
        self._agents[agent.task] = agent
        self._hosts[agent.task] = hello.host
        self._addresses[agent.task] = hello.address
        self._started.pop((agent.task, hello.attempt), None)
        self._obey(self._gang.joined(agent.task))
        return agent

    def take_loss(self, agent: _Agent, channel: Channel, why: str) -> None:
        """Take the end of an agent's connection."""
        if self._agents.get(agent.task) is agent:
            self._lose(agent.task, why)

    def take_word(self, agent: _Agent, message: messages.Message) -> None:
        """Take what an agent says; what it said before it was lost counts no more."""
        task = agent.task
        if self._agents.get(task) is not agent:
            return
        match message:
            case messages.TaskDoing(text=text):
                self._gang.doing(task, text)
            case messages.TaskPrepared(attempt=attempt, free_ports=free):
                if attempt == self._gang.attempt(task):
                    agent.free_ports = free
                    self._obey(self._gang.prepared(task))
            case messages.TaskNotPrepared(state=state, why=why, code=code):
                self._ends[task] = message
                self._port_users.discard(task)
                self._obey(self._gang.could_not_prepare(task, State(state), why, code))
            case messages.TaskStarted(attempt=attempt, pid=pid):
                self.event(
                    "task_started", task=task, attempt=attempt, pid=pid, host=agent.hello.host
                )
            case messages.TaskEnded(attempt=attempt, code=code, signum=signum):
                self.event(
                    "task_ended", task=task, attempt=attempt, code=code, elapsed_s=message.elapsed_s
                )
                self._ends[task] = message
                self._port_users.discard(task)
                self._obey(self._gang.ended(task, code=code, signum=signum))
            case messages.TaskUploaded(error=error, notes=notes, versions=versions):
                for note in notes:
                    self.event("notice", text=f"{task}: {note}")
                for version in versions:
                    self.event("dataset_version", task=task, version=version)
                self._obey(self._gang.uploaded(task, error))
            case messages.TaskOutput():
                self.show(message)
            case messages.Notice(text=text):
                self.event("notice", text=text)
            case messages.BarrierCall():
                self._take_barrier_call(task, message)
            case messages.BarrierLeave(caller_id=caller_id):
                self._callers.pop(caller_id, None)
                self._barriers.leave(caller_id)
            case _ if isinstance(message, messages.FromExecTask):
                self._execs.from_task(task, message)

    def client_gone(self, client: HeadClient) -> None:
        """Take the end of a client's connection."""
        super().client_gone(client)
        self._execs.client_gone(client.channel)

    def take_request(self, client: HeadClient, message: messages.Message) -> None:
        """Take what a client asks for."""
        match message:
            case messages.Watch(owner=owner):
                self.watch(client, owner=owner)
            case messages.Stop(who=who, cause=cause, at_once=at_once):
                grace_s = 0.0 if at_once else None
                self._stop(State.FAILED_CANCELED, f"stopped by {who or cause.value}", grace_s)
            case _ if isinstance(message, messages.FromExecClient):
                self._execs.from_client(client.channel, message)

    def _send_exec(self, task: str, message: messages.Message) -> bool:
        self._send(task, message)
        return task in self._agents

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
        """Its process is gone: after it has called, its connection says so; before, only this does."""
        self._leaving.discard((task, attempt))
        had_not_called = self._started.pop((task, attempt), None) is not None
        if had_not_called and attempt == self._gang.attempt(task):
            self._lose(task, f"its agent ended before it called ({how})")

    def _lose(self, task: str, why: str) -> None:
        self._agents.pop(task, None)
        self._port_users.discard(task)
        self._execs.task_gone(task, why)
        if self._gang.phase(task) is TaskPhase.OVER:
            return
        for caller_id in [c for c, owner in self._callers.items() if owner == task]:
            self._callers.pop(caller_id)
            self._barriers.leave(caller_id)
        self._starter.kill(task)
        self.event("agent_lost", task=task, why=why)
        self._obey(self._gang.lost(task, why))

    # What has to be done.

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
                self._later(after_s, lambda: self._to_start.append((task, number)))
            case gang.Begin():
                self._send(task, self._begin_message(task, attempt))
            case gang.Again(attempt=number, after_s=after_s):
                self._later(after_s, lambda: self._send(task, messages.TaskAgain(attempt=number)))
            case gang.StopCommand(grace_s=grace_s, after_s=after_s):
                stop = messages.TaskStop(attempt=attempt, grace_s=grace_s)
                self._later(after_s, lambda: self._send(task, stop))
            case gang.UploadState():
                succeeded = self._gang.is_succeeding(task)
                upload = messages.TaskUpload(attempt=attempt, succeeded=succeeded)
                self._send(task, upload)
            case gang.Release():
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
            agent.channel.send_nowait(messages.TaskLeave())
            self._execs.task_gone(task, "the task has ended")
        if self._gang.phase(task) is TaskPhase.OVER:
            self._barriers_without(task)

    def _barriers_without(self, task: str) -> None:
        outcome = self._outcomes.get(task)
        how = outcome.state.value if outcome is not None else "ended"
        self._answer_barriers(self._barriers.member_gone(task, f"it is {how}"))

    def _send(self, task: str, message: messages.Message) -> None:
        agent = self._agents.get(task)
        if agent is not None:
            agent.channel.send_nowait(message)

    def _tell(self, order: gang.Tell) -> None:
        fields: dict[str, Any] = {
            "group": self._group.name,
            "task": order.task,
            "attempt": order.attempt,
            "state": order.state.value,
            "why": order.why,
        }
        if order.code is not None:
            fields["code"] = order.code
        self._outcomes[order.task] = TaskOutcome(
            task=order.task,
            state=order.state,
            attempt=order.attempt,
            why=order.why,
            code=order.code,
        )
        self.event("task_state", **fields)

    def _note_state(self) -> None:
        state = self._gang.state
        if state is self._state:
            return
        self._state = state
        if state is State.RUNNING and self._running_since is None:
            self._running_since = time.monotonic() - self._options.ran_s
        self.event("group_state", group=self._group.name, state=state.value)

    def _begin_message(self, task: str, attempt: int) -> messages.TaskBegin:
        if not self._port_users:  # who begins beside others must get the ports that they have
            self._chosen_ports = self._choose_ports()
        self._port_users.add(task)
        return messages.TaskBegin(
            attempt=attempt,
            hosts=dict(self._hosts),
            addresses=dict(self._addresses),
            ports=self._chosen_ports,
        )

    def _choose_ports(self) -> dict[str, int]:
        names = port_names(self._group)
        if not names:
            return {}
        common = [set(agent.free_ports) for agent in self._agents.values() if agent.free_ports]
        free = set.intersection(*common) if common else set()
        candidates = port_candidates(self._options.plan, self._group)
        chosen = [port for port in candidates if port in free] or list(candidates)
        return dict(zip(names, chosen, strict=False))

    # Barriers of the tasks' own.

    def _take_barrier_call(self, task: str, call: messages.BarrierCall) -> None:
        self._callers[call.caller_id] = task
        answers = self._barriers.arrive(
            call.caller_id,
            task,
            call.name,
            count=call.count,
            rank=call.rank,
            now_s=time.monotonic(),
            timeout_s=call.timeout_s,
        )
        self._answer_barriers(answers)

    def _answer_barriers(self, answers: tuple[messages.BarrierAnswer, ...]) -> None:
        for answer in answers:
            task = self._callers.get(answer.caller_id)
            if task is not None:
                self._send(task, answer)

    # The end.

    def _conclude(self) -> GroupOutcome:
        state = self._gang.state
        is_worth_it = state.is_failed and state is not State.FAILED_CANCELED
        report = self._report() if is_worth_it else None
        lead = self._outcomes.get(self._group.lead.name)
        code = 0
        if state.is_failed:
            failure = self._gang.first_failure
            found = failure.code if failure is not None else lead.code if lead else 1
            code = found if found is not None and 0 < found < 256 else 1
            if state is State.FAILED_CANCELED:
                code = 128 + signal.SIGTERM
        outcome = GroupOutcome(
            group=self._group.name,
            state=state,
            exit_code=code,
            elapsed_s=time.monotonic() - self._started_at,
            tasks=tuple(self._outcomes.values()),
            report=report,
        )
        path = self._options.run_dir.group(self._group.name).result
        self.disk.flush(5.0)
        try:
            atomic.write_json(path, codec.to_plain(outcome))
        except OSError as error:  # the owner hears it in the event below
            text = f"the result of group {self._group.name} could not be written: {error.strerror}"
            self.event("notice", text=text)
        self.event("group_ended", outcome=codec.to_plain(outcome))
        return outcome

    def _report(self) -> Report:
        failure = self._gang.first_failure
        name = self._group.name
        if failure is None:
            why = self._stop_why or "it was stopped"
            error = f"group {name} ended as {self._gang.state.value}: {why}"
            return Report(error=error, because=self._earlier_failures())
        verdict = self._training_verdict(failure)
        if verdict is not None:
            return replace(verdict, error=f"task {failure.task} failed: {verdict.error}")
        end = self._ends.get(failure.task)
        tail = end.tail if isinstance(end, messages.TaskEnded) else end.detail if end else ()
        shared = self._options.plan.network is TaskNetwork.SHARED
        others = [t.name for t in self._group.tasks if t.name != failure.task] if shared else []
        report = explain_task_failure(
            FailureFacts(
                group=name,
                task=failure.task,
                attempt=failure.attempt,
                why=failure.why,
                code=failure.code,
                tail=tail,
                memory_evidence=end.memory_evidence
                if isinstance(end, messages.TaskEnded)
                else None,
                hint=end.hint if isinstance(end, messages.TaskNotPrepared) else None,
                others=others,
                log=self._options.run_dir.task_log(name, failure.task, failure.attempt),
            )
        )
        return replace(report, because=(*report.because, *self._earlier_failures()))

    def _earlier_failures(self) -> tuple[str, ...]:
        """What did not count may still be the cause: a peer that is gone makes the lead fail."""
        shown = self._gang.ignored[:4]
        return tuple(f"{failure.task} had failed before: {failure.why}" for failure in shown)

    def _training_verdict(self, failure: gang.Failure) -> Report | None:
        """Return the verdict of the run that a training task was: it names the rank and the line."""
        if self._group.task(failure.task).training is None or self._stop_why is not None:
            return None
        folder = self._options.run_dir.training_folder(failure.task, failure.attempt)
        for path in glob.glob(os.path.join(glob.escape(folder), "*", "result.json")):
            plain = atomic.read_json(path)
            try:
                report = codec.from_plain(Report, (plain or {}).get("report"))
            except codec.CodecError:
                continue
            return report
        return None

    async def _say_goodbye(self) -> None:
        """Let agents leave by themselves for a moment, and clients hear the last event."""
        deadline = time.monotonic() + 5.0
        while self._leaving and time.monotonic() < deadline:
            for task, attempt, _ in self._starter.poll():
                self._leaving.discard((task, attempt))
            await asyncio.sleep(0.01)
        for client in self._clients:
            await client.channel.close()


def port_names(group: GroupPlan) -> list[str]:
    """Return the names in `{{port:NAME}}` of a group's texts; the empty one for `{{port}}`."""
    names: dict[str, None] = {}
    for token in find_tokens(json.dumps(codec.to_plain(group), ensure_ascii=False)):
        if token.kind == "port":
            names[token.argument or ""] = None
    return list(names)


def port_candidates(plan: WorkflowPlan, group: GroupPlan) -> tuple[int, ...]:
    """Return ports that all tasks of a group try, in the same order: not those that the kernel gives to callers."""
    if not port_names(group):
        return ()
    low, high = _ephemeral_range()
    usable = [port for port in range(10240, 65536) if not low <= port <= high]
    # Not for secrets: all tasks must come to the same list.
    chooser = random.Random(f"{plan.uuid}/{group.name}")
    return tuple(chooser.sample(usable, min(_NUM_PORT_CANDIDATES, len(usable))))


def _ephemeral_range() -> tuple[int, int]:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = file.read().split()
            return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999
