"""Allocate the resources of this machine, or of ssh hosts, to groups, and decide which can run at once.

A group gets all that it asks for, or nothing. One that asks for more than there is runs when no
other group does. On ssh hosts, a task goes to the host with the fewest tasks of those on which it
fits; tasks of a group that is too large share hosts.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmuster.core.model.text import few_of
from torchmuster.workflow.plan import GroupNodes, GroupPlan, TaskNode, TaskPlan, WorkflowPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The resources of one machine; `gpus` are ids for CUDA_VISIBLE_DEVICES."""

    num_cpus: int
    gpus: tuple[str, ...] = ()
    memory_bytes: int = 0
    storage_bytes: int = 0


def this_machine(folder: str, gpus: Sequence[str]) -> Machine:
    """Return what this process may use; storage is that of `folder`, or 0 if that is unreadable."""
    try:
        disk = os.statvfs(folder)
        storage_bytes = disk.f_bavail * disk.f_frsize
    except OSError:
        storage_bytes = 0
    return Machine(
        num_cpus=len(os.sched_getaffinity(0)),
        gpus=tuple(gpus),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        storage_bytes=storage_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allocation:
    cpus: int
    memory_bytes: int
    gpus: frozenset[str]


@dataclass(slots=True)
class Capacity:
    """Allocates the resources of this machine to groups."""

    machine: Machine
    _held: dict[str, _Allocation] = field(default_factory=dict)

    def try_take(self, group: GroupPlan) -> dict[str, list[str]] | None:
        """Return the GPUs of each task, or None when the group has to wait."""
        need_cpus = min(sum(cpus_of(task) for task in group.tasks), self.machine.num_cpus)
        need_gpus = sum(gpus_of(task) for task in group.tasks)
        need_bytes = min(_memory_of(group), self.machine.memory_bytes)
        free = self._free_gpus()
        if self._held and (
            need_cpus > self._free_cpus()
            or need_bytes > self._free_bytes()
            or min(need_gpus, len(self.machine.gpus)) > len(free)
        ):
            return None
        given = self._share(group, free, need_gpus)
        taken = frozenset(gpu for gpus in given.values() for gpu in gpus)
        self._held[group.name] = _Allocation(cpus=need_cpus, memory_bytes=need_bytes, gpus=taken)
        return given

    def give_back(self, group: str) -> None:
        """Free the resources of a group."""
        self._held.pop(group, None)

    def why_waiting(self, group: GroupPlan) -> str:
        """Return why a group can't run now."""
        cpus = sum(cpus_of(task) for task in group.tasks)
        gpus = sum(gpus_of(task) for task in group.tasks)
        asked = [_count(cpus, "CPU")]
        free = [f"{self._free_cpus()} of {_count(self.machine.num_cpus, 'CPU')}"]
        if gpus:
            asked.append(_count(gpus, "GPU"))
            free.append(f"{len(self._free_gpus())} of {_count(len(self.machine.gpus), 'GPU')}")
        if need_bytes := _memory_of(group):
            asked.append(f"{_gib(need_bytes)} of memory")
            free.append(f"{_gib(self._free_bytes())} of {_gib(self.machine.memory_bytes)}")
        names = list(self._held)
        runs = f"{few_of(names, 4)} {'runs' if len(names) == 1 else 'run'}"
        return f"waits for {' and '.join(asked)}; {' and '.join(free)} are free, {runs}"

    def _free_cpus(self) -> int:
        return self.machine.num_cpus - sum(held.cpus for held in self._held.values())

    def _free_bytes(self) -> int:
        return self.machine.memory_bytes - sum(h.memory_bytes for h in self._held.values())

    def _free_gpus(self) -> list[str]:
        taken = {gpu for held in self._held.values() for gpu in held.gpus}
        return [gpu for gpu in self.machine.gpus if gpu not in taken]

    def _share(self, group: GroupPlan, free: list[str], need: int) -> dict[str, list[str]]:
        """Give each task its own GPUs; if too few are free, all that ask get all free ones."""
        given: dict[str, list[str]] = {}
        position = 0
        for task in group.tasks:
            count = gpus_of(task)
            if need > len(free):
                given[task.name] = free if count else []
            else:
                given[task.name] = free[position : position + count]
                position += count
        return given if self.machine.gpus else {}


def cpus_of(task: TaskPlan) -> int:
    """Return the number of CPUs that a task asks for, over all its nodes."""
    return _cpus(task) * task.num_nodes


def gpus_of(task: TaskPlan) -> int:
    """Return the number of GPUs that a task asks for, over all its nodes."""
    return (task.resources.gpu or 0) * task.num_nodes


def describe_shortfalls(plan: WorkflowPlan, machine: Machine) -> list[str]:
    """Return a sentence for each resource of which a group asks for more than the machine has."""
    found: list[str] = []
    kinds = {
        "gpu": (gpus_of, len(machine.gpus)),
        "cpu": (lambda t: (t.resources.cpu or 0) * t.num_nodes, machine.num_cpus),
    }
    for kind, (of_task, here) in kinds.items():
        asked = max(sum(of_task(task) for task in group.tasks) for group in plan.groups)
        if asked > here:
            what = "tasks run without one" if here == 0 else "tasks share what there is"
            found.append(f"{kind}: {asked} asked for, {here} here: {what}")
    sizes = {"memory": machine.memory_bytes, "storage": machine.storage_bytes}
    for kind, here in sizes.items():
        asked = max(
            sum(getattr(t.resources, f"{kind}_bytes") or 0 for t in group.tasks)
            for group in plan.groups
        )
        if asked > here > 0:
            found.append(
                f"{kind}: {_gib(asked)} asked for, {_gib(here)} here: tasks share what there is"
            )
    return found


def _memory_of(group: GroupPlan) -> int:
    return sum((task.resources.memory_bytes or 0) * task.num_nodes for task in group.tasks)


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'s' if number != 1 else ''}"


def _gib(size_bytes: int) -> str:
    number = size_bytes / (1 << 30)
    return f"{number:,.0f} GiB" if number >= 100 else f"{number:.3g} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The resources of a host; `slots` limits its tasks, None for no limit."""

    name: str
    num_cpus: int
    num_gpus: int = 0
    memory_bytes: int = 0
    slots: int | None = None


@dataclass(slots=True)
class _Use:
    """The used resources of one host."""

    facts: HostFacts
    num_tasks: int = 0
    cpus: int = 0
    memory_bytes: int = 0
    gpus: set[str] = field(default_factory=set)

    def fits(self, task: TaskPlan) -> bool:
        slots = self.facts.slots
        return (
            self.cpus + _cpus(task) <= self.facts.num_cpus
            and len(self.gpus) + (task.resources.gpu or 0) <= self.facts.num_gpus
            and self.memory_bytes + (task.resources.memory_bytes or 0) <= self.facts.memory_bytes
            and (slots is None or self.num_tasks < slots)
        )

    def take(self, task: TaskPlan, sign: int = 1) -> None:
        self.num_tasks += sign
        self.cpus += sign * _cpus(task)
        self.memory_bytes += sign * (task.resources.memory_bytes or 0)

    def free_gpus(self, count: int) -> list[str]:
        """Return `count` free GPUs for a task; all GPUs of the host if too few are free."""
        every = [str(index) for index in range(self.facts.num_gpus)]
        free = [gpu for gpu in every if gpu not in self.gpus]
        return free[:count] if len(free) >= count else every


@dataclass(frozen=True, slots=True)
class _PlacedTask:
    task: TaskPlan
    host: str
    gpus: tuple[str, ...]


class HostCapacity:
    """Places the tasks of groups on hosts.

    Attributes:
        broker: The name of the broker that starts agents on these hosts.
    """

    def __init__(self, facts: Sequence[HostFacts], broker: str) -> None:
        self.broker = broker
        self._uses = {one.name: _Use(one) for one in facts}
        self._held: dict[str, list[_PlacedTask]] = {}
        self._turn = 0

    def try_take(self, group: GroupPlan) -> dict[str, list[str]] | None:
        """Place a group; return each task's GPUs on its first host, or None if it has to wait."""
        placed = self._place(group, must_fit=True)
        if placed is None and not self._held:
            placed = self._place(group, must_fit=False)
        if placed is None:
            return None
        self._held[group.name] = placed
        first: dict[str, list[str]] = {}
        for given in placed:
            if self._uses[given.host].facts.num_gpus:
                first.setdefault(given.task.name, list(given.gpus))
        return first

    def _place(self, group: GroupPlan, *, must_fit: bool) -> list[_PlacedTask] | None:
        placed: list[_PlacedTask] = []
        turn = self._turn
        for task in group.tasks:
            taken: set[str] = set()
            for _ in range(min(task.num_nodes, len(self._uses))):
                use = self._choose(task, taken, must_fit=must_fit)
                if use is None:
                    self._turn = turn
                    self._release(placed)
                    return None
                taken.add(use.facts.name)
                gpus = tuple(use.free_gpus(task.resources.gpu or 0))
                use.take(task)
                use.gpus.update(gpus)
                placed.append(_PlacedTask(task, use.facts.name, gpus))
        return placed

    def _choose(self, task: TaskPlan, taken: set[str], *, must_fit: bool) -> _Use | None:
        names = list(self._uses)
        order = names[self._turn % len(names) :] + names[: self._turn % len(names)]
        open_ones = [self._uses[name] for name in order if name not in taken]
        fitting = [use for use in open_ones if use.fits(task)]
        if not fitting and must_fit:
            return None
        chosen = min(fitting or open_ones, key=lambda use: use.num_tasks)
        self._turn = names.index(chosen.facts.name) + 1
        return chosen

    def _release(self, placed: Sequence[_PlacedTask]) -> None:
        for given in placed:
            use = self._uses[given.host]
            use.take(given.task, -1)
            use.gpus.difference_update(given.gpus)

    def give_back(self, group: str) -> None:
        """Free the resources of a group."""
        self._release(self._held.pop(group, []))

    def why_waiting(self, group: GroupPlan) -> str:
        """Return why a group can't run now."""
        count = sum(task.num_nodes for task in group.tasks)
        runs = ", ".join(list(self._held)[:4])
        return f"waits for room for {_count(count, 'task')} on {len(self._uses)} hosts; {runs} run there"

    def nodes_of(self, group: str) -> GroupNodes:
        """Return the hosts of the tasks of a group."""
        tasks: dict[str, tuple[TaskNode, ...]] = {}
        for given in self._held.get(group, []):
            has_gpus = self._uses[given.host].facts.num_gpus > 0
            node = TaskNode(name=given.host, gpus=given.gpus if has_gpus else None)
            tasks[given.task.name] = (*tasks.get(given.task.name, ()), node)
        return GroupNodes(engine="ssh", tasks=tasks)


def largest_min_hosts(plan: WorkflowPlan) -> tuple[str, int]:
    """Return the task with the highest minimum number of hosts, and that number."""
    needs = [
        (task.name, task.min_nodes)
        for group in plan.groups
        if group.name not in plan.reused
        for task in group.tasks
    ]
    return max(needs, key=lambda need: need[1], default=("", 1))


def describe_crowding(plan: WorkflowPlan, num_hosts: int) -> str | None:
    """Return a sentence if a group has more tasks than there are hosts, else None."""
    counts = {
        group.name: sum(min(task.num_nodes, num_hosts) for task in group.tasks)
        for group in plan.groups
    }
    name, count = max(counts.items(), key=lambda item: item[1])
    if count <= num_hosts:
        return None
    hosts = _count(num_hosts, "host")
    return f"group {name} has {count} tasks for {hosts}: a host runs several of them"


def _cpus(task: TaskPlan) -> int:
    return max(1, task.resources.cpu or 1)
