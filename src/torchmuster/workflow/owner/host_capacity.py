"""Place the tasks of a workflow on ssh hosts, and decide which groups can run at once.

Either all tasks of a group are placed or none. A task goes to the host with the fewest tasks of
those on which it fits. A group that is larger than all hosts together runs when no other group
does, with several tasks on a host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchmuster.workflow.plan import GroupNodes, GroupPlan, TaskNode, TaskPlan, WorkflowPlan


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
        if not count:
            return []
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
        room = f"room for {count} task{'s' if count != 1 else ''}"
        runs = ", ".join(list(self._held)[:4])
        return f"waits for {room} on {len(self._uses)} hosts; {runs} run there"

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
    hosts = f"{num_hosts} host{'s' if num_hosts != 1 else ''}"
    return f"group {name} has {count} tasks for {hosts}: a host runs several of them"


def _cpus(task: TaskPlan) -> int:
    return max(1, task.resources.cpu or 1)
