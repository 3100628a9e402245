"""Allocate this machine's resources to groups, and decide which groups can run at once."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmuster.core.model.text import few_of
from torchmuster.workflow.plan import GroupPlan, TaskPlan, WorkflowPlan


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
    """Allocates resources to groups: all that a group asks for, or nothing.

    A group that asks for more than the machine has runs when no other group does.
    """

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
    return max(1, task.resources.cpu or 1) * task.num_nodes


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
