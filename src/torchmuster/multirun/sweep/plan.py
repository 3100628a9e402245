"""The plan of a sweep (`sweep.json`), and how a member's values reach its script."""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.contract import MEMBER_VARIABLE, METRIC_VARIABLE
from torchmuster.core.model.plan import Program, RunPlan

MAX_MEMBERS = 10_000
_REMOVED_FIELDS = frozenset({"gpu_bytes"})  # earlier releases wrote them into `sweep.json`

# Every member's environment has the sweep's id, its own number, and each value by its name.
SWEEP_VARIABLE = "MUSTER_SWEEP"
VALUE_PREFIX = "MUSTER_SWEEP_"

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")


class ValueStyle(enum.Enum):
    """How values without a placeholder are passed to the script."""

    OPTION = "option"  # --lr 1e-3
    HYDRA = "hydra"  # lr=1e-3
    ENV = "env"  # not at all: the script reads its environment


class MetricGoal(enum.Enum):
    """Which values of the metric are better."""

    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricChoice:
    """The metric by which a sweep compares members.

    Attributes:
        name: The name that the training library records, or that the script prints: `name=0.1`
            or `name: 0.1`.
    """

    name: str
    goal: MetricGoal = MetricGoal.MIN

    def is_better(self, value: float, than: float) -> bool:
        """Return whether a value is better than another; NaN is never better."""
        if value != value:
            return False
        if than != than:
            return True
        return value < than if self.goal is MetricGoal.MIN else value > than

    def best_of(self, values: Mapping[int, float]) -> int | None:
        """Return the member with the best value, the first of equals; None if all are NaN."""
        best: int | None = None
        for member, value in sorted(values.items()):
            if value == value and (best is None or self.is_better(value, values[best])):
                best = member
        return best


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlace:
    """A slot on an ssh host.

    Attributes:
        gpus: The GPUs that its members see; empty: all that the host shows.
    """

    site: str
    host: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """The plan of a sweep.

    Attributes:
        run: The plan of a member before it gets its values; its run id is the sweep's.
        names: The names of the values that vary, in the order of the command line.
        members: The values of each member, in the order of `names`.
        slots: How many members run at a time.
        per_gpu: How many workers may share a GPU.
        stop: The rule that stops the worst early; None: all run to their end.
        places: Where each slot is; empty: all are on this machine, or in the session of `run`.
    """

    run: RunPlan
    names: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]
    style: ValueStyle = ValueStyle.OPTION
    slots: int = 1
    per_gpu: int = 1
    metric: MetricChoice | None = None
    stop: str | None = None
    places: tuple[SweepPlace, ...] = ()

    @property
    def run_id(self) -> str:
        """Return the id of the sweep."""
        return self.run.run_id

    @property
    def is_of_single_workers(self) -> bool:
        """Return whether each member is one process."""
        return self.run.max_nodes == 1 and self.run.num_workers(0) == 1

    @property
    def is_forked(self) -> bool:
        """Return whether the owner of the sweep forks its members, which then have no head."""
        return self.is_of_single_workers and not self.places and self.run.session is None

    def member_id(self, number: int) -> str:
        """Return the run id of a member: `NAME.7`."""
        return f"{self.run_id}.{number}"

    def values_of(self, number: int) -> dict[str, str]:
        """Return the values of a member by name."""
        return dict(zip(self.names, self.members[number], strict=True))

    def words_of(self, number: int) -> str:
        """Return the values of a member as `lr=0.1 seed=3`."""
        return " ".join(f"{name}={value}" for name, value in self.values_of(number).items())

    def member_plan(self, number: int) -> RunPlan:
        """Return the run plan of a member."""
        values = self.values_of(number)
        program = with_values(self.run.program, values, self.style)
        environment = (
            *self.run.node_setup.environment,
            (SWEEP_VARIABLE, self.run_id),
            (MEMBER_VARIABLE, str(number)),
            *((variable_of(name), value) for name, value in values.items()),
        )
        if program.call is not None and self.metric is not None:
            environment = (*environment, (METRIC_VARIABLE, self.metric.name))
        setup = replace(self.run.node_setup, environment=environment)
        return replace(self.run, run_id=self.member_id(number), program=program, node_setup=setup)


def read_sweep(run_dir: RunDir) -> SweepPlan | None:
    """Return the plan of a sweep; None if it can't be read."""
    plain = atomic.read_json(run_dir.sweep)
    if isinstance(plain, dict):
        plain = {name: value for name, value in plain.items() if name not in _REMOVED_FIELDS}
    try:
        return codec.from_plain(SweepPlan, plain)
    except codec.CodecError:
        return None


def with_values(program: Program, values: dict[str, str], style: ValueStyle) -> Program:
    """Return the program with the values in its arguments: in placeholders, the others appended."""
    taken = {name for word in program.args for name in _PLACEHOLDER.findall(word)}
    args = [
        _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), word)
        for word in program.args
    ]
    for name, value in values.items():
        if name in taken or style is ValueStyle.ENV:
            continue
        args += [f"--{name}", value] if style is ValueStyle.OPTION else [f"{name}={value}"]
    return replace(program, args=tuple(args))


def variable_of(name: str) -> str:
    """Return the variable for a value: `MUSTER_SWEEP_OPTIMIZER_LR` for `optimizer.lr`."""
    return VALUE_PREFIX + re.sub(r"[^A-Za-z0-9]", "_", name).upper()
