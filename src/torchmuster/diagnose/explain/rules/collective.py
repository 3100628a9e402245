"""Collectives that never ended, and connections lost because of another rank."""

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.index import RULE_ROWS
from torchmuster.diagnose.explain.events import LogEvent, LogFinding, LogLine
from torchmuster.diagnose.explain.reading.scan import Log
from torchmuster.diagnose.explain.rules.rows import HIGH, LOW, MEDIUM, found_by, words_of

# Comparisons of ranks: how many raised the same, which waited where, and how torchrun says that
# they ended.


_TABLE_RANK = re.compile(r"(?P<rank>\d{1,6}) \(local_rank: (?P<local>\d+)\)")
_EXIT_CODE = re.compile(r"-?\d+")
_MAX_NAMED = 8
# How far a rank is in a process group, which has one name on all ranks (`PG GUID`; `PG ID` is each
# rank's own count):
#   [PG 0 (default_pg) Rank 1] Timeout at NCCL work: 9, last enqueued NCCL work: 9,
#     last completed NCCL work: 8.
#   [PG ID 1 PG GUID 3(tp) Rank 1]  failure detected by watchdog at work sequence id: 9 PG status:
#     last enqueued work: 9, ...
#   [PG ID 0 PG GUID 0 Rank 1] Received a dump signal ... Last enqueued NCCL work: 9, last completed
#     NCCL work: 8.This is ...
# Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (createLogPrefix, the watchdog's loop,
# getNCCLWatchdogTimeoutErrorMsg), torch 2.3 to 2.8; the strings in the libraries of 2.6, 2.7, 2.8,
# 2.11, 2.15.
# Some releases after 2.11 print `, last started work: 9 (ALLREDUCE)` between the two numbers.
_COUNTERS = re.compile(
    r"\[PG (?:ID \d+ PG GUID )?(?P<group>[^\s(\]]+) ?(?:\((?P<named>[^)]*)\) ?)?Rank (?P<rank>\d+)\]"
    r"(?:.*? at (?:NCCL )?work(?: sequence id)?: (?P<at>\d+))?.*?\b[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d+),"
)


@dataclass(slots=True)
class GroupCounters:
    """What the ranks of a process group print about its collectives, which are numbered.

    Attributes:
        is_of_all: It is the group of all ranks.
        enqueued: The last number that each rank has enqueued, by its rank in the job.
        waited_in: The number in which a rank waited until its timeout.
        lines: The first line of each rank.
    """

    is_of_all: bool
    enqueued: dict[int, int] = field(default_factory=dict)
    waited_in: dict[int, int] = field(default_factory=dict)
    lines: dict[int, LogEvent] = field(default_factory=dict)

    @property
    def behind(self) -> list[int]:
        """The ranks that had not enqueued the collective in which others waited."""
        first = min(self.waited_in.values(), default=-1)
        return sorted(rank for rank, number in self.enqueued.items() if number < first)


def timed_out_groups(case: Case) -> list[GroupCounters]:
    """Return the counters of process groups with a timeout, in the order of their timeouts."""
    groups: dict[str, GroupCounters] = {}
    for event in case.events:
        found = _COUNTERS.search(event.line.text)
        if found is None:
            continue
        is_of_all = found["group"] == "0" or found["named"] == "default_pg"
        # The rank in the prefix is that of the group; only in the group of all ranks it is that of
        # the job.
        rank = int(found["rank"]) if is_of_all and event.who.rank is None else event.who.rank
        if rank is None:
            continue
        group = groups.setdefault(found["group"], GroupCounters(is_of_all=is_of_all))
        group.enqueued[rank] = max(int(found["enqueued"]), group.enqueued.get(rank, -1))
        group.lines.setdefault(rank, event)
        if found["at"]:
            group.waited_in.setdefault(rank, int(found["at"]))
    timed_out = [group for group in groups.values() if group.waited_in]
    first = {id(g): case.earliest(g.lines[rank] for rank in g.waited_in).line for g in timed_out}
    return sorted(timed_out, key=lambda g: (first[id(g)].when or 0.0, first[id(g)].order))


def raised_by(case: Case, event: LogEvent, events: Sequence[LogEvent]) -> str:
    """Return who raised the same as an event: `all 4 ranks`, `ranks 2 and 3`, `3 processes`.

    Messages that differ only in numbers are the same: each rank names its own file or layer. Return
    an empty string for one rank.
    """
    same = [e for e in events if e.get("uncaught") and _shape(e) == _shape(event)]
    ranks = {e.who.rank for e in same if e.who.rank is not None}
    if len(ranks) > 1:
        size = size_of(case)
        return f"all {len(ranks)} ranks" if len(ranks) == size else named(ranks)
    if ranks or len({e.line.order for e in same}) < 2:
        return ""
    return f"{len(same)} processes"


def _shape(event: LogEvent) -> tuple[str, str]:
    return event.get("type"), re.sub(r"\d+", "0", event.get("message"))


def named(ranks: Iterable[int]) -> str:
    """Return `rank 3`, `ranks 2 and 3`, or the first eight of many."""
    words = [str(rank) for rank in sorted(ranks)]
    if len(words) == 1:
        return f"rank {words[0]}"
    if len(words) > _MAX_NAMED:
        return f"ranks {', '.join(words[:_MAX_NAMED])} and {len(words) - _MAX_NAMED} others"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def size_of(case: Case) -> int | None:
    """Return how many ranks the job has, by its lines or by torchrun's table of the only node."""
    return case.stated_size or len(table_of_one_node(case)) or None


def table_of_one_node(case: Case) -> dict[int, int]:
    """Return each rank's exit code, if the job had one node; ranks not in torchrun's table have 0.

    The last ranks may be missing from the result when they ended well.
    """
    if len(case.of("root_cause_table")) != 1 or (case.num_nodes or 1) > 1:
        return {}
    codes: dict[int, int] = {}
    for row, following in pairwise(case.of("table_row", "exit_code")):
        rank = _TABLE_RANK.match(row.get("value")) if row.get("key") == "rank" else None
        code = _EXIT_CODE.match(following.get("code"))
        if rank is None or code is None or following.line.order != row.line.order + 1:
            continue
        if rank["rank"] != rank["local"]:
            return {}
        codes[int(rank["rank"])] = int(code[0])
    return {rank: codes.get(rank, 0) for rank in range(max(codes) + 1)} if codes else {}


_DEFAULTS_MS = {
    600_000: "NCCL's default of 10 minutes",
    1_800_000: "the default of 30 minutes",
    300_000: "the default of 5 minutes",
}


_POINT_TO_POINT = ("recv", "send", "irecv", "isend")
_MISSING = RULE_ROWS["collective.missing"]
_AT_THE_STORE = re.compile(r"DistStoreError|DistNetworkError|Socket Timeout|wait timeout after")
_NAMES_WHY = re.compile(r"errno|No route|unreachable|refused|reset by peer|not known")


def stuck_collective(case: Case) -> Iterator[LogFinding]:
    """Report ranks that waited in a collective, and name those that did not reach it."""
    waits = case.of("watchdog", "gloo_timeout")
    waits += [e for e in case.of("store_get") if "imeout" in e.get("why") + e.get("other")]
    if not waits:
        return
    groups = [] if _are_by_pairs(waits) else timed_out_groups(case)
    counters = groups[0] if groups else None
    elsewhere = {rank for group in groups[1:] for rank in group.waited_in}
    calls = {
        e.who.rank: (e.get("seq"), e.get("op"))
        for e in waits
        if e.get("seq") and e.who.rank is not None
        if e.who.rank not in elsewhere
    }
    if len(set(calls.values())) > 1:
        shown = sorted((rank, op, seq) for rank, (seq, op) in calls.items())
        words = ", ".join(f"rank {rank}: {op} number {seq}" for rank, op, seq in shown[:4])
        # Each group counts separately: the same call at another number may be another group's.
        sure = HIGH if len({op for _, op in calls.values()}) > 1 else MEDIUM
        yield found_by(
            case, RULE_ROWS["collective.differ"], waits, {"calls": words}, confidence=sure
        )
        return
    places, size = _places(case, waits), size_of(case)
    if counters is not None and counters.behind:
        yield _behind_by_number(case, waits, counters)
    elif len({place for _, place in places}) > 1:
        words = ", ".join(f"{who} at {place}" for who, place in places[:4])
        yield found_by(case, RULE_ROWS["collective.wait-elsewhere"], waits, {"places": words})
    elif (
        size is not None and size > 1 and size in (len(places), len(calls), _num_arrived(counters))
    ):
        call = waits[0].get("raised_in")
        row = (
            RULE_ROWS["collective.all-receive"]
            if call in _POINT_TO_POINT
            else RULE_ROWS["collective.all-waited"]
        )
        yield found_by(case, row, waits, {"size": str(size), "call": call})
    else:
        yield _missing(case, waits, counters)


def _are_by_pairs(waits: list[LogEvent]) -> bool:
    """Return whether these are sends and receives: pairs count separately, so numbers differ."""
    return any(re.search(r"SEND|RECV|COALESCED", e.get("op")) for e in waits)


def _num_arrived(counters: GroupCounters | None) -> int:
    return len(counters.enqueued) if counters is not None and counters.is_of_all else 0


def _behind_by_number(case: Case, waits: list[LogEvent], counters: GroupCounters) -> LogFinding:
    """Return a finding that names the ranks whose counters are behind what others waited in."""
    behind, first = counters.behind, min(counters.waited_in.values())
    last = max(counters.enqueued[rank] for rank in behind)
    named = f"rank {', '.join(map(str, behind[:8]))}"
    why = f"by the numbers that the ranks print, work {first} timed out, and {named} had enqueued {last} last"
    shown = (case.earliest(waits).line, *(counters.lines[rank].line for rank in behind[:2]))
    has_all_counters = len(counters.enqueued) == case.world_size
    return found_by(
        case,
        _MISSING,
        waits,
        {"missing": named},
        because=(why,),
        evidence=shown,
        confidence=HIGH if has_all_counters else MEDIUM,
    )


def _places(case: Case, waits: list[LogEvent]) -> list[tuple[str, str]]:
    """Return each rank with its line of the user's code, if all ranks of the job waited.

    Where lines have no label, each traceback counts as another rank's.
    """
    own = [e for e in waits if e.get("own") and e.get("where")]
    if any(str(e.who) for e in own) or len({e.line.path for e in own}) > 1:
        found = list({str(e.who) or e.line.path: e.get("where") for e in own}.items())
    else:
        found = [("one rank", e.get("where")) for e in own]
    size = case.world_size if any(e.who.rank is not None for e in waits) else size_of(case)
    return found if len(found) >= max(2, size or 2) else []


def _missing(case: Case, waits: list[LogEvent], counters: GroupCounters | None) -> LogFinding:
    waiting = {e.who.rank for e in waits if e.who.rank is not None}
    size = max(case.world_size or 0, size_of(case) or 0)
    if counters is not None:
        waiting |= counters.enqueued.keys()
    if _are_by_pairs(waits) or (counters is not None and not counters.is_of_all):
        size = 0  # unknown which ranks take part
    missing = sorted(set(range(size)) - waiting) if size and len(waiting) < size and waiting else []
    spoke = {e.who.rank for e in case.of("peer_lost", "exception")}
    missing = [rank for rank in missing if rank not in spoke]  # these reached a collective as well
    if not waiting:
        missing = _only_ended_by_others(case, len(waits))
    named = ", ".join(map(str, missing[:8])) or (_behind(case) if counters is None else "")
    limit = case.earliest(waits).get("ms")
    default = _DEFAULTS_MS.get(int(limit)) if limit.isdigit() else None
    expired = (f"what expired is {default}",) if default else ()
    return found_by(
        case,
        _MISSING,
        waits,
        {"missing": f"rank {named}" if named else "a rank"},
        confidence=MEDIUM if named else LOW,
        because=(*_MISSING.because, *expired),
    )


def _only_ended_by_others(case: Case, num_waited: int) -> list[int]:
    """Return the ranks that torchrun ended while all others raised timeouts, without labels."""
    codes = table_of_one_node(case)
    ended = [rank for rank, code in codes.items() if code == -signal.SIGTERM]
    return ended if len(codes) - len(ended) == num_waited else []


def _behind(case: Case) -> str:
    """Return the one writer that got less far than all others; empty when there is none."""
    progress = case.progress
    if len(progress) < 2:
        return ""
    least = min(progress.values())
    slow = [who for who, number in progress.items() if number == least]
    return str(slow[0]) if len(slow) == 1 and least < max(progress.values()) else ""


def ended_early(case: Case) -> Iterator[LogFinding]:
    """Report a rank that ended without an error while others still needed it."""
    lost = case.of("peer_lost", "gloo_timeout")
    failed = case.of("child_failed")
    if not lost or len(failed) != 1 or failed[0].get("code") != "1":
        return
    raisers = {(e.line.path, e.who.rank) for e in lost if e.get("type")}
    others = [log for log in case.record.logs if log.path != failed[0].line.path]
    # A launcher reaches its last barrier only when its own ranks have ended well.
    ended = {e.line.path for e in case.of("exit_barrier")}
    quiet = [
        log
        for log in others
        if log.path in ended or not any(e.line.path == log.path for e in case.of("peer_lost"))
    ]
    # A launcher that logs its steps would log its end; a reset is the kernel's sign of a killed
    # process.
    tell = {e.line.path for e in case.config("min_nodes")}
    if any("reset" in e.get("how") for e in lost):
        tell |= {log.path for log in quiet}
    quiet = [log for log in quiet if log.path in ended or log.path not in tell]
    # Without a message about its end it may as well have been killed.
    said = {e.line.path for e in case.of("success")}
    quiet = [log for log in quiet if log.path in ended or log.path in said]
    if not raisers or not quiet or case.of("rdzv_timeout", "signal_received"):
        return
    quiet.sort(key=lambda log: log.path not in ended)
    event = case.earliest([e for e in lost if e.line.path == failed[0].line.path] or lost)
    yield found_by(
        case,
        RULE_ROWS["collective.ended-early"],
        [event],
        {"early": quiet[0].who.host or quiet[0].path},
        confidence=MEDIUM if quiet[0].path in ended else LOW,
        evidence=(event.line, *_last_words(case, quiet[0])),
    )


def ended_before_peer(case: Case) -> Iterator[LogFinding]:
    """Report a rank that ended by itself while another one of its launcher lost its peer."""
    for failed in case.of("child_failed"):
        lost = [e for e in case.of("peer_lost") if e.line.path == failed.line.path]
        if any(e.who.rank is None for e in lost):
            continue  # unknown who lost whom
        quiet = _ranks_ended_before(case, failed) if failed.get("code") == "1" and lost else []
        if quiet:
            shown = (case.earliest(lost).line, failed.line)
            names = {"early": ", ".join(map(str, quiet))}
            # A reset is the kernel's sign of a killed process, perhaps on another node.
            sure = LOW if any("reset" in e.get("how") for e in lost) else MEDIUM
            yield found_by(
                case,
                RULE_ROWS["collective.ended-beside"],
                lost,
                names,
                evidence=shown,
                confidence=sure,
            )


def _ranks_ended_before(case: Case, failed: LogEvent) -> list[int]:
    """Return a launcher's ranks that wrote and had ended by themselves when another one failed."""
    same = (failed.line.path, failed.who.host, failed.who.task)
    all_of_it = [e for e in case.events if (e.line.path, e.who.host, e.who.task) == same]

    def of_launcher(*kinds: str) -> list[LogEvent]:
        return [e for e in all_of_it if e.kind in kinds]

    tables = of_launcher("root_cause_table")
    if len(tables) != 1 or len(of_launcher("child_failed")) != 1:
        return []
    rows = [e for e in of_launcher("table_row") if e.get("key") == "rank"]
    in_table = {int(m[0]) for e in rows if (m := re.match(r"\d+", e.get("value"))) is not None}
    ended = sum("Sending process" in e.line.text for e in of_launcher("teardown"))
    spoke = {int(e.get("rank")) for e in of_launcher("world") if e.get("rank")}
    spoke |= {e.who.rank for e in all_of_it if e.who.rank is not None}
    raised = {e.who.rank for e in of_launcher("peer_lost", "exception")}
    spoke |= table_of_one_node(case).keys()
    quiet = sorted(spoke - in_table - raised)
    return quiet if len(quiet) > ended else []


def _last_words(case: Case, log: Log) -> tuple[LogLine, ...]:
    """Return the lines that show that the ranks of a log had ended."""
    came = [e.line for e in case.of("exit_barrier") if e.line.path == log.path]
    return tuple(came[:1] or log.last[-1:])


def lost_connections(case: Case) -> Iterator[LogFinding]:
    """Report lost connections when the rank that went first left no message."""
    waited = [e for e in case.of("exception", "store_wait") if _AT_THE_STORE.search(words_of(e))]
    waited = [e for e in waited if not _NAMES_WHY.search(words_of(e))]
    if waited and not case.of("peer_lost", "nccl_remote", "store_connect", "store_validate"):
        yield found_by(case, RULE_ROWS["collective.store-waited"], waited)
        return
    lost = case.of("peer_lost", "nccl_remote", "store_get")
    lost += (
        []
        if case.of("store_connect", "store_validate", "rdzv_timeout")
        else case.of("rdzv_connection")
    )
    lost += case.of("gloo_connect") if not lost else []
    if not lost:
        return
    named = [e.get("host") for e in lost if e.get("host")]
    peer = max(dict.fromkeys(named), key=named.count) if named else ""
    names = {"lost": peer or "another one", "at_peer": peer or "the node that went"}
    yield found_by(case, RULE_ROWS["collective.lost"], lost, names)
