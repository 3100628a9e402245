"""Decide what happens to a group when one of its tasks joins, ends or is lost. No I/O.

The head of a group reports events to the policy and carries out the actions that it returns. Rules:

- Commands start together: none starts while another task of the group still prepares (unless
  `barrier: false`).
- When the lead's command succeeds, the others get a moment to end by themselves. Then they are
  stopped, and get time to upload their outputs. They count as completed.
- When the lead fails, or any task of a group with `ignoreNonleadStatus: false`, the group fails and
  the others stop.
- A retry of the lead, or of any task whose status counts, restarts the others too: in place, at
  once.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchmuster.core.model.contract import signal_name
from torchmuster.core.model.plan import GRACE_S
from torchmuster.workflow.plan import ExitAction, GroupPlan, TaskPlan
from torchmuster.workflow.record import State, group_state

WIND_DOWN_S = 5.0
FAILURE_GRACE_S = 5.0
MAX_BACKOFF_S = 60.0
CODE_AGENT_LOST = 3001
CODE_UPLOAD = 2012


class TaskPhase(enum.Enum):
    """What a task's agent is doing; finer than the task's state."""

    ABSENT = "its agent starts"
    PREPARING = "preparing"
    READY = "waiting at the barrier"
    RUNNING = "running"
    ENDING = "being stopped"
    UPLOADING = "uploading"
    PAUSING = "waiting to be tried again"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An action that the head of the group must carry out for one task."""

    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgent(Action):
    """After a pause, start an agent for a new attempt in a new working directory."""

    attempt: int
    after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCommand(Action):
    """Start the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryInPlace(Action):
    """After a pause, let the same agent prepare the next attempt in the same working directory."""

    attempt: int
    after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCommand(Action):
    """Send SIGTERM after `after_s`, SIGKILL `grace_s` later; a grace of 0 means SIGKILL only."""

    grace_s: float
    after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadOutputs(Action):
    """Upload the outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAgent(Action):
    """Let the agent end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell(Action):
    """Record a change of state."""

    attempt: int
    state: State
    why: str | None = None
    code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of one attempt of a task."""

    task: str
    attempt: int
    why: str
    code: int | None


@dataclass(slots=True, kw_only=True)
class _Member:
    plan: TaskPlan
    attempt: int = 0
    retries_spent: int = 0
    phase: TaskPhase = TaskPhase.ABSENT
    state: State = State.SCHEDULING
    detail: str = ""
    code: int | None = None
    joined: bool = False
    # What the end in progress leads to: a final state, or another attempt in place.
    outcome: State | None = None
    outcome_why: str | None = None
    lives_again: bool = False


@dataclass(slots=True)
class GroupPolicy:
    """The tasks of one group, and the decisions about them.

    Attributes:
        first_failure: The first failure that counts: of the lead, or of any task if all statuses
            count.
        ignored: Failures that don't count, in the order in which they came.
    """

    plan: GroupPlan
    grace_s: float = GRACE_S
    backoff_s: float = 1.0
    is_stopping: bool = False
    first_failure: Failure | None = None
    ignored: list[Failure] = field(default_factory=list)
    _has_run: bool = False
    _members: dict[str, _Member] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._members = {task.name: _Member(plan=task) for task in self.plan.tasks}

    # Queries.

    @property
    def is_over(self) -> bool:
        """Return whether every task has ended for good."""
        return all(member.phase is TaskPhase.OVER for member in self._members.values())

    @property
    def state(self) -> State:
        """Return the state of the group; once RUNNING, it stays so during retries until its end."""
        states = {name: member.state for name, member in self._members.items()}
        lead = self.plan.lead.name
        state = group_state(states, lead, ignore_nonlead=self.plan.ignore_nonlead)
        return State.RUNNING if self._has_run and not state.is_final else state

    def attempt(self, task: str) -> int:
        """Return the number of a task's newest attempt."""
        return self._members[task].attempt

    def phase(self, task: str) -> TaskPhase:
        """Return what a task's agent is doing."""
        return self._members[task].phase

    def is_succeeding(self, task: str) -> bool:
        """Return whether the current end of a task counts as a success."""
        return self._members[task].outcome is State.COMPLETED

    def waits_for(self) -> list[str]:
        """Return the tasks that hold up the barrier or the group's end, each with its activity."""
        kinds = {TaskPhase.ABSENT, TaskPhase.PREPARING, TaskPhase.ENDING, TaskPhase.PAUSING}
        if not any(member.phase is TaskPhase.RUNNING for member in self._members.values()):
            kinds.add(TaskPhase.UPLOADING)
        return [
            f"{name} ({member.detail or member.phase.value})"
            for name, member in self._members.items()
            if member.phase in kinds
        ]

    # Events.

    def start(self, first_attempts: dict[str, int] | None = None) -> list[Action]:
        """Start every task; after a lost head, attempts continue from `first_attempts`."""
        orders: list[Action] = []
        for name, member in self._members.items():
            member.attempt = (first_attempts or {}).get(name, 0)
            orders += self._enter(member, State.SCHEDULING, TaskPhase.ABSENT)
            orders.append(StartAgent(task=name, attempt=member.attempt))
        return orders

    def joined(self, task: str) -> list[Action]:
        """Handle that a task's agent has joined and is preparing."""
        member = self._members[task]
        if member.phase is not TaskPhase.ABSENT:
            return []
        member.joined = True
        member.detail = ""
        orders = self._enter(member, State.INITIALIZING, TaskPhase.PREPARING)
        orders += self._enter(member, State.RUNNING, TaskPhase.PREPARING)
        return orders if self.plan.barrier else orders + self._open_barrier()

    def doing(self, task: str, detail: str) -> None:
        """Record the agent's description of what it is doing."""
        self._members[task].detail = detail

    def prepared(self, task: str) -> list[Action]:
        """Handle that a task's inputs, files and working directory are ready."""
        member = self._members[task]
        if member.phase is not TaskPhase.PREPARING:
            return []
        member.detail = ""
        member.phase = TaskPhase.READY
        return self._open_barrier()

    def could_not_prepare(self, task: str, state: State, why: str, code: int) -> list[Action]:
        """Handle that a task can't start: an input is missing, or files collide."""
        member = self._members[task]
        if member.phase is TaskPhase.OVER:
            return []
        member.code = code
        rule = next((rule for rule in member.plan.exit_rules if rule.matches(code)), None)
        again = (ExitAction.RESCHEDULE, ExitAction.RESTART)
        if rule is not None and rule.action in again and member.outcome is None:
            return self._retry(member, ExitAction.RESCHEDULE, why, or_else=state)
        if member.outcome is not None:
            return self._finish(member, member.outcome, member.outcome_why)
        return self._fail_at_once(member, state, why)

    def ended(self, task: str, *, code: int, signum: int | None) -> list[Action]:
        """Handle the end of a task's command."""
        member = self._members[task]
        if member.phase not in (TaskPhase.RUNNING, TaskPhase.ENDING):
            return []
        member.code = code
        what = signal_name(signum) if signum else f"exit code {code}"
        if member.lives_again:
            return self._retry_in_place(member)
        if member.outcome is not None:
            return self._conclude(member)
        action = member.plan.action(code)
        if action in (ExitAction.RESCHEDULE, ExitAction.RESTART) and not self.is_stopping:
            return self._retry(member, action, what)
        if action is ExitAction.COMPLETE:
            member.outcome, member.outcome_why = State.COMPLETED, None if code == 0 else what
        else:
            member.outcome, member.outcome_why = State.FAILED, what
            self._note_failure(member, what)
        return self._conclude(member) + self._consequences(member)

    def uploaded(self, task: str, error: str | None) -> list[Action]:
        """Handle the end of an upload, which has failed when `error` is given."""
        member = self._members[task]
        if member.phase is not TaskPhase.UPLOADING:
            return []
        if error is not None and member.outcome is State.COMPLETED:
            member.code = CODE_UPLOAD
            return self._fail_at_once(member, State.FAILED, error)
        return self._finish(member, member.outcome or State.COMPLETED, member.outcome_why)

    def lost(self, task: str, why: str) -> list[Action]:
        """Handle the loss of a task's agent."""
        member = self._members[task]
        if member.phase in (TaskPhase.OVER, TaskPhase.PAUSING):
            return []
        member.code = CODE_AGENT_LOST
        member.joined = False
        if member.outcome is not None and member.outcome is not State.COMPLETED:
            return self._finish(member, member.outcome, member.outcome_why)
        if self.is_stopping:
            return self._fail_at_once(member, State.FAILED_BACKEND_ERROR, why)
        rule = next((r for r in member.plan.exit_rules if r.matches(CODE_AGENT_LOST)), None)
        if rule is not None and rule.action is ExitAction.FAIL:
            return self._fail_at_once(member, State.FAILED_BACKEND_ERROR, why)
        member.lives_again = False
        member.outcome = member.outcome_why = None  # what it had not uploaded is lost
        backend = State.FAILED_BACKEND_ERROR
        return self._retry(member, ExitAction.RESCHEDULE, why, or_else=backend)

    def stop(self, state: State, why: str, grace_s: float | None = None) -> list[Action]:
        """End all tasks, because of a cancellation or a time limit."""
        self.is_stopping = True
        orders: list[Action] = []
        for member in self._members.values():
            orders += self._halt(member, state, why, self.grace_s if grace_s is None else grace_s)
        return orders

    # Transitions.

    def _open_barrier(self) -> list[Action]:
        unfinished = [m for m in self._members.values() if m.phase is not TaskPhase.OVER]
        if self.plan.barrier and any(
            m.phase in (TaskPhase.ABSENT, TaskPhase.PREPARING, TaskPhase.ENDING, TaskPhase.PAUSING)
            for m in unfinished
        ):
            return []
        orders: list[Action] = []
        for member in unfinished:
            if member.phase is TaskPhase.READY and (
                self.plan.barrier or self._all_joined(unfinished)
            ):
                orders += self._enter(member, State.RUNNING, TaskPhase.RUNNING)
                orders.append(StartCommand(task=member.plan.name))
        return orders

    def _all_joined(self, members: Iterable[_Member]) -> bool:
        """Return whether all agents have joined; commands need the addresses of all tasks."""
        return all(member.joined for member in members)

    def _conclude(self, member: _Member) -> list[Action]:
        """Upload after the last end of a command, unless the task was canceled."""
        if member.outcome is State.FAILED_CANCELED:
            return self._finish(member, member.outcome, member.outcome_why)
        member.phase = TaskPhase.UPLOADING
        member.detail = ""
        return [UploadOutputs(task=member.plan.name)]

    def _consequences(self, member: _Member) -> list[Action]:
        """Return what the end of one task means for the others."""
        if self.is_stopping:
            return []
        failed = member.outcome is not State.COMPLETED or member.state.is_failed
        is_lead = member.plan.name == self.plan.lead.name
        if not is_lead and (not failed or self.plan.ignore_nonlead):
            return self._open_barrier()  # the barrier no longer waits for it
        self.is_stopping = True
        others = [m for m in self._members.values() if m is not member]
        orders: list[Action] = []
        for other in others:
            if failed:
                why = f"stopped because {member.plan.name} failed"
                orders += self._halt(other, State.FAILED, why, FAILURE_GRACE_S)
            else:
                why = f"stopped after the lead {member.plan.name} had ended"
                orders += self._halt(other, State.COMPLETED, why, self.grace_s, WIND_DOWN_S)
        return orders

    def _halt(
        self, member: _Member, state: State, why: str, grace_s: float, after_s: float = 0.0
    ) -> list[Action]:
        if member.phase is TaskPhase.OVER:
            return []
        if member.phase is TaskPhase.UPLOADING and state is not State.FAILED_CANCELED:
            return []  # let it finish
        if member.outcome is None or state is State.FAILED_CANCELED:
            member.outcome, member.outcome_why = state, why
        member.lives_again = False
        if member.phase in (TaskPhase.RUNNING, TaskPhase.ENDING):
            if after_s == 0.0:
                member.phase = TaskPhase.ENDING
            return [StopCommand(task=member.plan.name, grace_s=grace_s, after_s=after_s)]
        return self._finish(member, member.outcome, member.outcome_why)

    def _give_up(self, member: _Member, what: str, or_else: State | None) -> list[Action]:
        spent = member.plan.max_retries
        times = "once" if spent == 1 else f"{spent} times"
        why = f"{what}; tried again {times} already" if spent else f"{what}; max_retries is 0"
        if or_else is not None:
            return self._fail_at_once(member, or_else, why)
        self._note_failure(member, why)
        member.outcome, member.outcome_why = State.FAILED, why
        return self._conclude(member) + self._consequences(member)

    def _retry(
        self, member: _Member, action: ExitAction, what: str, or_else: State | None = None
    ) -> list[Action]:
        """Spend a retry; if none is left, fail: as `or_else` without an upload, if given."""
        if member.retries_spent >= member.plan.max_retries:
            return self._give_up(member, what, or_else)
        after_s = min(self.backoff_s * 2**member.retries_spent, MAX_BACKOFF_S)
        member.retries_spent += 1
        left = member.plan.max_retries - member.retries_spent
        name = member.plan.name
        orders = self._next_attempt(member, f"{what}; {action.value}, {left} left")
        member.phase = TaskPhase.ABSENT
        member.detail = f"tried again in {after_s:g} s after {what}"
        if action is ExitAction.RESCHEDULE:
            member.joined = False
            orders += [
                ReleaseAgent(task=name),
                StartAgent(task=name, attempt=member.attempt, after_s=after_s),
            ]
        else:
            orders += self._enter(member, State.RUNNING, TaskPhase.PREPARING, member.detail)
            orders.append(RetryInPlace(task=name, attempt=member.attempt, after_s=after_s))
        if name == self.plan.lead.name or not self.plan.ignore_nonlead:
            orders += self._restart_others(member)
        return orders

    def _fail_at_once(self, member: _Member, state: State, why: str) -> list[Action]:
        """Fail without an upload, because there is nothing to upload or no agent to do it."""
        self._note_failure(member, why)
        orders = self._finish(member, state, why)
        return orders + self._consequences(member)

    def _note_failure(self, member: _Member, why: str) -> None:
        name = member.plan.name
        failure = Failure(task=name, attempt=member.attempt, why=why, code=member.code)
        if self.plan.ignore_nonlead and name != self.plan.lead.name:
            self.ignored.append(failure)
        elif self.first_failure is None:
            self.first_failure = failure

    def _restart_others(self, cause: _Member) -> list[Action]:
        orders: list[Action] = []
        for member in self._members.values():
            if member is not cause and member.phase is TaskPhase.RUNNING and member.outcome is None:
                member.lives_again = True
                member.phase = TaskPhase.ENDING
                member.detail = f"restarted with {cause.plan.name}"
                orders.append(StopCommand(task=member.plan.name, grace_s=0.0))
        return orders

    def _retry_in_place(self, member: _Member) -> list[Action]:
        member.lives_again = False
        member.code = None  # our own SIGKILL caused it
        orders = self._next_attempt(member, member.detail)
        orders += self._enter(member, State.RUNNING, TaskPhase.PREPARING, member.detail)
        return [*orders, RetryInPlace(task=member.plan.name, attempt=member.attempt)]

    def _next_attempt(self, member: _Member, why: str) -> list[Action]:
        name, attempt = member.plan.name, member.attempt
        rescheduled = Tell(
            task=name, attempt=attempt, state=State.RESCHEDULED, why=why, code=member.code
        )
        member.attempt += 1
        member.state = State.SCHEDULING
        member.code = None  # it was the previous attempt's
        return [rescheduled]

    def _finish(self, member: _Member, state: State, why: str | None) -> list[Action]:
        member.detail = why or ""
        orders = self._enter(member, state, TaskPhase.OVER, why)
        orders.append(ReleaseAgent(task=member.plan.name))
        return orders + (self._open_barrier() if not self.is_stopping else [])

    def _enter(
        self, member: _Member, state: State, phase: TaskPhase, why: str | None = None
    ) -> list[Action]:
        member.phase = phase
        if state is member.state and state is not State.SCHEDULING:
            return []
        member.state = state
        self._has_run = self._has_run or state is State.RUNNING
        name = member.plan.name
        code = member.code if state.is_final else None
        return [Tell(task=name, attempt=member.attempt, state=state, why=why, code=code)]
