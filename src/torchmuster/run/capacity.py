"""What this machine has, what groups ask for, and which of them may run beside each other."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmuster.model.workflow import GroupPlan, TaskPlan, WorkflowPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The resources of one machine; GPUs by the ids that CUDA_VISIBLE_DEVICES takes."""

    num_cpus: int
    gpus: tuple[str, ...] = ()
    memory_bytes: int = 0
    storage_bytes: int = 0


def this_machine(folder: str, gpus: Sequence[str]) -> Machine:
    """Return what this process may use; storage is that of `folder`."""
    disk = os.statvfs(folder)
    return Machine(
        num_cpus=len(os.sched_getaffinity(0)),
        gpus=tuple(gpus),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        storage_bytes=disk.f_bavail * disk.f_frsize,
    )


@dataclass(slots=True)
class Capacity:
    """Gives resources to groups, all that a group asks for or nothing.

    A group that asks for more than the machine has runs when nothing else does.
    """

    machine: Machine
    _held: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)

    def try_take(self, group: GroupPlan) -> dict[str, list[str]] | None:
        """Return the GPUs of each task, or None when the group has to wait."""
        need_cpus = min(sum(cpus_of(task) for task in group.tasks), self.machine.num_cpus)
        need_gpus = sum(gpus_of(task) for task in group.tasks)
        free = [gpu for gpu in self.machine.gpus if not self._is_held(gpu)]
        if self._held:
            free_cpus = self.machine.num_cpus - sum(cpus for cpus, _ in self._held.values())
            if need_cpus > free_cpus or min(need_gpus, len(self.machine.gpus)) > len(free):
                return None
        given = self._share(group, free, need_gpus)
        taken = tuple({gpu for gpus in given.values() for gpu in gpus})
        self._held[group.name] = (need_cpus, taken)
        return given

    def give_back(self, group: str) -> None:
        """Free what a group held."""
        self._held.pop(group, None)

    def why_waiting(self, group: GroupPlan) -> str:
        """Return why a group can't run now."""
        cpus = sum(cpus_of(task) for task in group.tasks)
        gpus = sum(gpus_of(task) for task in group.tasks)
        asked = f"{cpus} CPU{'s' if cpus != 1 else ''}"
        asked += f" and {gpus} GPU{'s' if gpus != 1 else ''}" if gpus else ""
        holders = ", ".join(list(self._held)[:4])
        return f"waits for {asked} of this machine's {self.machine.num_cpus} and {len(self.machine.gpus)}, held by {holders}"

    def _is_held(self, gpu: str) -> bool:
        return any(gpu in gpus for _, gpus in self._held.values())

    def _share(self, group: GroupPlan, free: list[str], need: int) -> dict[str, list[str]]:
        """Give each task GPUs of its own; where there are too few, all tasks that ask see all."""
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
    """Return how many CPUs a task asks for, over all its nodes."""
    return max(1, task.resources.cpu or 1) * task.num_nodes


def gpus_of(task: TaskPlan) -> int:
    """Return how many GPUs a task asks for, over all its nodes."""
    return (task.resources.gpu or 0) * task.num_nodes


def shortfalls(plan: WorkflowPlan, machine: Machine) -> list[str]:
    """Return a sentence for each kind of resource of which one group asks for more than there is."""
    found: list[str] = []
    kinds = {
        "gpu": (gpus_of, len(machine.gpus)),
        "cpu": (lambda t: (t.resources.cpu or 0) * t.num_nodes, machine.num_cpus),
    }
    for kind, (of_task, here) in kinds.items():
        asked = max(sum(of_task(task) for task in group.tasks) for group in plan.groups)
        if asked > here:
            what = "tasks run without" if here == 0 else "tasks share what there is"
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


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.3g} GiB"
