"""A wait at the start of training, in one sentence: who waits where, for whom, and at which store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmuster.diagnose.facts import stacks
from torchmuster.diagnose.facts.stacks import Doing, StackReading
from torchmuster.head.hangs.watch import describe
from torchmuster.model.progress import RankStack, StoreCall
from torchmuster.model.ranks import name_ranks

# Where ranks wait until all have come, before the first collective.
_MEETINGS = ("init_process_group", "rendezvous", "TCPStore")
_MAX_GROUPS = 3
_MAX_SOURCE = 60
_MAX_LINES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLook:
    """One rank in one look.

    Attributes:
        rest_s: How long it has used no processor and moved no data.
        source: The line of the script where it stands.
        imports: It imports a library.
        store: Of a rank that makes a store: what it is connected to.
    """

    rank: int
    node: str
    standing: StackReading
    rest_s: float
    kernel: str = ""
    source: str = ""
    imports: bool = False
    store: StoreCall | None = None

    @classmethod
    def of(cls, rank: int, node: str, stack: RankStack, *, rest_s: float) -> "StartLook":
        """Return what a stack shows."""
        standing = stacks.judge(
            stack.text,
            state=stack.state,
            source=stack.source,
            children=stack.children,
            uses_gpu=stack.uses_gpu,
        )
        return cls(
            rank=rank,
            node=node,
            standing=standing,
            rest_s=rest_s,
            kernel=stack.kernel,
            source=stack.source,
            imports=stacks.imports(stack.text),
            store=stack.store,
        )

    @property
    def meets(self) -> bool:
        """Say whether it waits for the others to come."""
        return self.standing.doing is Doing.WAITS and self.standing.what in _MEETINGS


def is_elsewhere(call: StoreCall, store: str, relay_port: int = 0) -> bool:
    """Say whether a rank that makes a store is not at that of its run.

    An open connection counts by its port alone: the address may be another one of the same host. `relay_port` is the
    head's, where callers of the store are passed on to it; 0 where they are not.
    """
    port = store.rpartition(":")[2]
    ports = (port, str(relay_port)) if relay_port else (port,)
    if not port or any(end.rpartition(":")[2] in ports for end in call.connected):
        return False
    return store not in (*call.calling, call.named)


def tell_start(
    waiting: Sequence[StartLook],
    missing: Sequence[StartLook],
    ended: Mapping[int, str],
    store: str,
    relay_port: int = 0,
) -> str:
    """Return the sentence.

    Args:
        waiting: Ranks that wait for others to come; at least one.
        missing: The other ranks that live.
        ended: Rank -> how it has ended.
        store: `HOST:PORT` of the run's store.
        relay_port: A port of the head that leads to it, too; 0 without.
    """
    calls = [(one, one.store) for one in waiting if one.store is not None]
    away = [one for one, call in calls if is_elsewhere(call, store, relay_port)]
    parts = [_who_waits(waiting) + _for_whom(missing, ended)]
    if away:
        parts.append(_at_which_store(away, store))
    elif not missing and not ended:
        if len(waiting) > 1:
            parts[0] += ", though all of this attempt have come"
        parts.append(
            "do rank= and world_size= there agree with RANK and WORLD_SIZE, and do the nodes reach each other?"
        )
    return "; ".join(parts)


def _who_waits(waiting: Sequence[StartLook]) -> str:
    first, single = waiting[0].standing, len(waiting) == 1
    since_s = max(one.rest_s for one in waiting)
    place = f" ({first.place})" if first.place else ""
    verb = "waits" if single else "wait"
    ranks = name_ranks(one.rank for one in waiting)
    return f"{ranks} {verb} in {first.what}{place} since {since_s:.0f} s"


def _for_whom(missing: Sequence[StartLook], ended: Mapping[int, str]) -> str:
    groups: dict[str, list[StartLook]] = {}
    for one in missing:
        groups.setdefault(_does(one, single=True), []).append(one)
    told = [_tell_group(group) for group in list(groups.values())[:_MAX_GROUPS]]
    rest = list(groups.values())[_MAX_GROUPS:]
    if rest:
        told.append(f"for {sum(map(len, rest))} more")
    hows: dict[str, list[int]] = {}
    for rank, how in ended.items():
        hows.setdefault(how, []).append(rank)
    for how, ranks in list(hows.items())[:_MAX_GROUPS]:
        has = "has" if len(ranks) == 1 else "have"
        told.append(f"for {name_ranks(ranks)}, which {has} ended ({how})")
    return (" " + ", and ".join(told)) if told else ""


def _tell_group(group: Sequence[StartLook]) -> str:
    single = len(group) == 1
    at = f" on {group[0].node}" if single else ""
    return (
        f"for {name_ranks(one.rank for one in group)}{at}, which {_does(group[0], single=single)}"
    )


def _does(one: StartLook, *, single: bool) -> str:
    standing = one.standing
    if standing.doing is Doing.WORKS and standing.what.startswith("<") and one.source:
        line = (
            one.source if len(one.source) <= _MAX_SOURCE else f"{one.source[: _MAX_SOURCE - 3]}..."
        )
        return f"{'is' if single else 'are'} at `{line}` ({standing.place})"
    return describe(standing, one.kernel, single=single)


def _at_which_store(away: Sequence[StartLook], store: str) -> str:
    calls = [one.store for one in away if one.store is not None]
    single = len(away) == 1
    ranks = name_ranks(one.rank for one in away)
    where = next((end for call in calls for end in (*call.calling, call.named) if end), "")
    if where:
        does = f"{ranks} {'calls' if single else 'call'} {where}, where no store answers"
    else:
        does = f"{ranks} {'has' if single else 'have'} no connection to the store of this run"
    ours = f"the store of this run is at {store} (MASTER_ADDR, MASTER_PORT): does the script set its own?"
    lines = _telling(next((call.lines for call in calls if call.lines), ()), where)
    return "; ".join([does, " ".join([ours, *(f"`{line}`" for line in lines)])])


def _telling(lines: Sequence[str], where: str) -> Sequence[str]:
    """Return the lines of the script that name the address; the first ones where none does."""
    host, _, port = where.rpartition(":")
    words = [word for word in (host, port) if word]
    naming = [line for line in lines if any(word in line.partition(": ")[2] for word in words)]
    return (naming or lines)[:_MAX_LINES]
