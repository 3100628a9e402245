"""Messages between the processes of one node over a Unix socket (`net/ipc.py`).

Imported in the job's interpreter too, so it has to be quick.
"""

from torchmuster.model.failure import RanCode
from torchmuster.model.message import TypedMessage


class WorkerReport(TypedMessage):
    """From a worker of a training run to its agent."""


class WorkerFailed(WorkerReport):
    """An exception ends this worker; `model.failure.PythonError` documents the fields."""

    type_name: str
    message: str
    where: str | None
    traceback: str
    is_final: bool
    bases: tuple[str, ...]
    handled: str | None
    own: dict[str, str] | None
    code: RanCode | None = None
    blames_node: bool = False


class WorkerEndedWell(WorkerReport):
    """The script has ended; `largest_group` is None where the size of its world can't be told."""

    largest_group: int | None
    code: RanCode | None = None


class ValueKept(WorkerReport):
    """The function has returned, and its value is in its file; `model.failure.ValueNote` documents the fields."""

    size_bytes: int
    sha256: str
    python: str


class DebuggerHeld(WorkerReport):
    """A debugger holds this worker, or lets it go.

    Attributes:
        waits: The tool that the worker waits for somebody to bring: `debugpy` or `pdb`.
        folder: Where the worker's program runs, as an editor has to know.
    """

    active: bool
    waits: str = ""
    folder: str = ""


class StopAhead(WorkerReport):
    """The script saves and exits for a reason that would stop the next attempt too."""

    reason: str


class TrainingOver(WorkerReport):
    """The training library has stopped or finished: the last step, and the last saved one."""

    step: int
    saved_step: int | None


class AskMemory(WorkerReport):
    """It wants memory of this node that outlives the workers; `node.memory.HeldMemory` documents the fields."""

    names: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


class TaskRequest(TypedMessage):
    """From a process of a workflow's task to the task's agent."""


class AskBarrier(TaskRequest):
    """It has reached a barrier; `net.messages.BarrierCall` documents the fields."""

    name: str = "default"
    count: int | None = None
    rank: int | None = None
    timeout_s: float = 600.0


class AgentAnswer(TypedMessage):
    """From an agent to a caller."""


class CallTaken(AgentAnswer):
    """The agent has the report."""


class MemoryHeld(AgentAnswer):
    """What the agent holds: each name's descriptor in the agent's process."""

    pid: int
    descriptors: dict[str, int]


class CallFailed(AgentAnswer):
    """The parts of an error."""

    what: str
    where: str | None = None
    why: str | None = None
    fix: str | None = None
    timed_out: bool = False


class BarrierWaits(AgentAnswer):
    """The barrier is not full; names the missing callers."""

    what: str
    left_s: float


class BarrierReleased(AgentAnswer):
    """The barrier is full."""
