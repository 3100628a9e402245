"""Which host holds which place of a run, which hosts are spare, and how many workers each has."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.core.model.plan import RunPlan
from torchmuster.errors import ChannelError
from torchmuster.launcher.engines.ssh_command import HostProblem, SshHost
from torchmuster.launcher.files.environment import PackedEnvironment


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """How to use the hosts.

    Attributes:
        hosts: All hosts that may be used; those beyond the plan's nodes are spare.
        where: What named them, for messages.
        by_slots: Whether the list of hosts gives the workers of each node.
        may_share: Look for a shared file system; else everything is copied.
        head_port: Loopback port for calls to the head; 0 for any.
        code_root: The folder of the code; None for the work tree that contains the program.
        environment: Waits for the workers' environment, which is packed meanwhile; None if hosts
            have their own.
        spares_first: Replace a lost host by a spare one at once, because it may take minutes to
            come back.
        passes_on: Whether a client gets the hosts' files next, and reports where they are.
        output: A folder on each host whose content is fetched into ours instead of the code
            folder's; empty for none.
    """

    hosts: tuple[SshHost, ...]
    where: str
    by_slots: bool = True
    may_share: bool = True
    head_port: int = 0
    code_root: str | None = None
    environment: Callable[[], PackedEnvironment] | None = None
    spares_first: bool = False
    passes_on: bool = False
    output: str = ""


class HostPlaces:
    """The hosts of a run: the first ones are its places, the others are spare."""

    def __init__(
        self, hosts: Sequence[SshHost], max_nodes: int, *, spares_first: bool = False
    ) -> None:
        self._spares_first = spares_first
        self._all = list(hosts)
        self._max_nodes = max_nodes
        self._at: list[SshHost] = list(hosts[:max_nodes])

    @property
    def hosts(self) -> tuple[SshHost, ...]:
        """The host of each place."""
        return tuple(self._at)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the places in messages."""
        return tuple(host.name for host in self._at)

    def settle(self, good: Sequence[SshHost]) -> None:
        """Make the hosts that answered the first places, followed by the others."""
        others = [host for host in self._all if host not in good]
        self._at = [*good, *others][: self._max_nodes]

    def candidates(self, place: int) -> list[SshHost]:
        """Return the hosts that may hold a place, its own and the spare ones, the best first."""
        spare = [host for host in self._all if host not in self._at]
        own = self._at[place : place + 1]
        return [*spare, *own] if self._spares_first else [*own, *spare]

    def take(self, place: int, host: SshHost) -> bool:
        """Give a place to a host; return whether the host is new there."""
        if place >= len(self._at) or self._at[place] == host:
            return False
        self._at[place] = host
        return True

    def exchange(self, one: int, other: int) -> None:
        """Exchange the hosts of two places."""
        self._at[one], self._at[other] = self._at[other], self._at[one]


def place_to_free(living: Collection[int], trained: Collection[int], plan: RunPlan) -> int | None:
    """Return the place whose host the head may get when its own is lost; None if there is none.

    Args:
        living: The places whose hosts answer, without the head's.
        trained: The places that had ranks in the last attempt.
        plan: Gives the number of nodes that an attempt needs.
    """
    spare = [place for place in living if place not in trained]
    if len(living) < plan.min_nodes:
        return None
    return max(spare or living, default=None)


def workers_of(hosts: Sequence[SshHost], gpus: Mapping[str, int], plan: RunPlan) -> tuple[int, ...]:
    """Return the workers of each place: the list's slots, else its GPUs, else the plan's."""
    return tuple(
        host.slots or gpus.get(host.name) or plan.num_workers(place)
        for place, host in enumerate(hosts)
    )


def bad_hosts(problems: Sequence[HostProblem], needed: int, where: str) -> ChannelError:
    """Return an error that names all hosts that can't be used."""
    names = ", ".join(problem.host for problem in problems)
    number = len(problems)
    what = f"{number} host{'s' if number != 1 else ''} can't be used: {names}"
    if needed > 1:
        what += f"; the run needs {needed}"
    fixes = list(dict.fromkeys(problem.fix for problem in problems if problem.fix))
    why = "\n".join(problem.line() for problem in problems) or None
    return ChannelError(what, where=where, why=why, fix="; ".join(fixes) or None)
