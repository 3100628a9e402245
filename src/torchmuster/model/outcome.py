"""How a group and its tasks ended, and the report on the failure that came first."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmuster.model.states import State
from torchmuster.model.verdict import Report

_TAKEN = ("Address already in use", "EADDRINUSE", "errno: 98", "[Errno 98]")


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
        tail: The last lines of its command, or what its agent said.
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


def explain_task_failure(facts: FailureFacts) -> Report:
    """Return the report on a group that ended with this failure."""
    because = list(facts.tail)
    hint = facts.hint
    if facts.memory_evidence:
        because.append(facts.memory_evidence)
    if facts.others and any(word in line for line in facts.tail for word in _TAKEN):
        shared = ", ".join(facts.others[:4])
        because.append(f"the tasks of this machine share its network: {facts.task}, {shared}")
        hint = (
            "give each task a port of its own, {{port:"
            + facts.task
            + "}}, or --task-network private"
        )
    if facts.code == 127 and hint is None:
        hint = "127 is a command that was not found"
    return Report(
        error=f"task {facts.task} failed: {facts.why}",
        at=f"group {facts.group}, task {facts.task}, attempt {facts.attempt}",
        because=tuple(because),
        hint=hint or f"its whole output is in {facts.log}",
    )
