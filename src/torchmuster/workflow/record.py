"""The record of a workflow: its states and events, and how tasks, groups and all of it ended.

    SUBMITTING -> WAITING -> PROCESSING -> SCHEDULING -> INITIALIZING -> RUNNING
    -> COMPLETED, RESCHEDULED (a task only), FAILED, FAILED_*

A state only moves forward; a finished one is final. The values are the words of users and records.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.events import RecordEvent, StartedEvent
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report
from torchmuster.core.owner.record import read_events
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.model.job import JobState


class State(enum.Enum):
    """The state of a task or a group; those before COMPLETED follow each other, the others are final."""

    SUBMITTING = "SUBMITTING"
    WAITING = "WAITING"
    PROCESSING = "PROCESSING"
    SCHEDULING = "SCHEDULING"
    INITIALIZING = "INITIALIZING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    RESCHEDULED = "RESCHEDULED"
    FAILED = "FAILED"
    FAILED_CANCELED = "FAILED_CANCELED"
    FAILED_SERVER_ERROR = "FAILED_SERVER_ERROR"
    FAILED_BACKEND_ERROR = "FAILED_BACKEND_ERROR"
    FAILED_EXEC_TIMEOUT = "FAILED_EXEC_TIMEOUT"
    FAILED_QUEUE_TIMEOUT = "FAILED_QUEUE_TIMEOUT"
    FAILED_IMAGE_PULL = "FAILED_IMAGE_PULL"
    FAILED_UPSTREAM = "FAILED_UPSTREAM"
    FAILED_EVICTED = "FAILED_EVICTED"
    FAILED_START_ERROR = "FAILED_START_ERROR"
    FAILED_START_TIMEOUT = "FAILED_START_TIMEOUT"
    FAILED_PREEMPTED = "FAILED_PREEMPTED"

    @property
    def is_final(self) -> bool:
        """Return whether no state can follow."""
        return self not in _ORDER

    @property
    def is_running(self) -> bool:
        """Return whether its command runs."""
        return self is State.RUNNING

    @property
    def is_failed(self) -> bool:
        """Return whether this is a failure."""
        return self.name.startswith("FAILED")

    @property
    def of_run(self) -> RunState:
        """Return the run state that corresponds to this workflow state."""
        if not self.is_final:
            begun = self in (State.INITIALIZING, State.RUNNING)
            return RunState.RUNNING if begun else RunState.WAITING
        if self is State.COMPLETED:
            return RunState.SUCCEEDED
        return RunState.CANCELLED if self is State.FAILED_CANCELED else RunState.FAILED

    def may_become(self, later: "State") -> bool:
        """Return whether `later` can follow: forward only, and nothing after an end."""
        if self.is_final:
            return False
        if later.is_final:
            return True
        return _ORDER.index(later) > _ORDER.index(self)


# The states that are not final, in the order in which they follow each other.
_ORDER = list(State)[: list(State).index(State.COMPLETED)]

# The failure that names a group or a workflow with several, strongest first.
_STRONGEST = [
    State.FAILED_CANCELED,
    State.FAILED_UPSTREAM,
    State.FAILED_SERVER_ERROR,
    State.FAILED_EXEC_TIMEOUT,
    State.FAILED_QUEUE_TIMEOUT,
    State.FAILED_PREEMPTED,
    State.FAILED_EVICTED,
]

_LEFT_NOTHING = State.FAILED_BACKEND_ERROR
_OF_JOB = {
    JobState.PENDING: State.SCHEDULING,
    JobState.HELD: State.SCHEDULING,
    JobState.SUSPENDED: State.SCHEDULING,
    JobState.REQUEUED: State.SCHEDULING,
    JobState.UNKNOWN: State.SCHEDULING,
    JobState.RUNNING: State.RUNNING,
    JobState.ENDING: State.RUNNING,
    JobState.PREEMPTED: State.FAILED_PREEMPTED,
    JobState.CANCELLED: State.FAILED_CANCELED,
    JobState.TIMED_OUT: State.FAILED_EXEC_TIMEOUT,
}


def state_of_job(job: JobState) -> State:
    """Return the state of a group without a result, from that of its job."""
    return _OF_JOB.get(job, _LEFT_NOTHING)


def group_state(tasks: Mapping[str, State], lead: str, *, ignore_nonlead: bool) -> State:
    """Return the state of a group from its tasks' newest attempts."""
    states = list(tasks.values())
    if any(not state.is_final for state in states):
        if any(state.is_final or state is State.RUNNING for state in states):
            return State.RUNNING
        return min(states, key=_ORDER.index)
    counted = [tasks[lead]] if ignore_nonlead else states
    failed = [state for state in counted if state.is_failed]
    return _one_of(failed) if failed else State.COMPLETED


def workflow_state(groups: Iterable[State]) -> State:
    """Return the state of a workflow from its groups."""
    states = list(groups)
    if any(not state.is_final for state in states):
        begun = [state for state in states if state.is_final or state is State.RUNNING]
        return State.RUNNING if begun else State.WAITING
    failed = [state for state in states if state.is_failed]
    own: list[State] = [state for state in failed if state is not State.FAILED_UPSTREAM]
    return _one_of(own or failed) if failed else State.COMPLETED


def _one_of(failed: list[State]) -> State:
    for state in _STRONGEST:
        if state in failed:
            return state
    return failed[0] if len(set(failed)) == 1 else State.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """How a task ended."""

    task: str
    state: State
    attempt: int
    why: str | None = None
    code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """The content of `groups/<group>/result.json`."""

    group: str
    state: State
    exit_code: int
    elapsed_s: float
    tasks: tuple[TaskOutcome, ...] = ()
    report: Report | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowResult:
    """The content of `result.json` of a workflow."""

    run_id: str
    state: State
    exit_code: int
    elapsed_s: float
    groups: dict[str, str] = field(default_factory=dict)
    reports: tuple[Report, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureFacts:
    """The facts about the failure of a task.

    Attributes:
        tail: The last lines of its command, or its agent's message.
        others: Tasks that run on the same machine and network.
    """

    group: str
    task: str
    attempt: int
    why: str
    log: str
    code: int | None = None
    tail: Sequence[str] = ()
    memory_evidence: str | None = None
    hint: str | None = None
    others: Sequence[str] = ()


_TAKEN = ("Address already in use", "EADDRINUSE", "errno: 98", "[Errno 98]")


def explain_task_failure(facts: FailureFacts) -> Report:
    """Return the report on a group that ended with this failure."""
    because = list(facts.tail)
    hint = facts.hint
    if facts.memory_evidence:
        because.append(facts.memory_evidence)
    if facts.others and any(word in line for line in facts.tail for word in _TAKEN):
        shared = ", ".join(facts.others[:4])
        because.append(f"the tasks of this machine share its network: {facts.task}, {shared}")
        port = "{{port:" + facts.task + "}}"
        hint = f"give each task a port of its own, {port}, or --task-network private"
    if facts.code == 127 and hint is None:
        hint = "127 is a command that was not found"
    return Report(
        error=f"task {facts.task} failed: {facts.why}",
        at=f"group {facts.group}, task {facts.task}, attempt {facts.attempt}",
        because=tuple(because),
        hint=hint,
        more=(f"log: {facts.log}",),
    )


def next_task_attempts(events: str) -> dict[str, int]:
    """Return the next attempt number of each task, from the record of a group with a lost head."""
    following: dict[str, int] = {}
    for one in read_events(events):
        if isinstance(event := one.event, TaskStateEvent):
            following[event.task] = max(following.get(event.task, 0), event.attempt + 1)
    return following


def read_outcome(run_dir: RunDir, group: str) -> GroupOutcome | None:
    """Return how a group of a workflow ended; None if unknown."""
    try:
        return codec.from_plain(GroupOutcome, atomic.read_json(run_dir.group(group).result))
    except codec.CodecError:
        return None


def note_group(run_dir: RunDir, group: str, report: Report) -> None:
    """Record a report as the outcome of a workflow's group whose job can never start."""
    outcome = GroupOutcome(
        group=group,
        state=State.FAILED_BACKEND_ERROR,
        exit_code=EngineError.exit_code,
        elapsed_s=0.0,
        report=report,
    )
    atomic.write_json(run_dir.group(group).result, codec.to_plain(outcome))


class WorkflowStartedEvent(StartedEvent):
    """An owner has started to conduct the workflow."""

    run_id: str = ""
    groups: tuple[str, ...] = ()


class WorkflowEndedEvent(RecordEvent):
    """The workflow is over."""

    state: str
    exit_code: int = 0


class GroupStartedEvent(RecordEvent):
    """A head has started to conduct a group."""

    group: str


class GroupWaitsEvent(RecordEvent):
    """A group is waiting; the text says for what."""

    group: str
    text: str = ""


class GroupStateEvent(RecordEvent):
    """A group has changed its state."""

    group: str
    state: str
    why: str | None = None


class GroupEndedEvent(RecordEvent):
    """A group is over."""

    outcome: GroupOutcome


class HeadLostEvent(RecordEvent):
    """The head of a group was lost."""

    group: str


class AgentLostEvent(RecordEvent):
    """The agent of a task was lost."""

    task: str
    why: str = ""


class TaskStartedEvent(RecordEvent):
    """The command of a task has started."""

    task: str
    attempt: int = 0
    pid: int | None = None
    host: str = ""


class TaskEndedEvent(RecordEvent):
    """The command of a task has ended."""

    task: str
    attempt: int = 0
    code: int | None = None
    elapsed_s: float = 0.0


class TaskStateEvent(RecordEvent):
    """A task has changed its state."""

    task: str
    state: str
    group: str = ""
    attempt: int = 0
    why: str | None = None
    code: int | None = None


class DatasetVersionEvent(RecordEvent):
    """A task has created a version of a dataset."""

    task: str
    version: str
