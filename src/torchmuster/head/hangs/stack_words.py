"""Where ranks stand, in one sentence: equal ones together, who waits first."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.diagnose.facts.stacks import Doing, StackReading
from torchmuster.model.ranks import name_ranks

_MOST_NAMED = 16  # of ranks that stand at the same place


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One rank in a sentence; `since_s` is how long it has not moved, None when that is not known."""

    rank: int
    node: str
    standing: StackReading
    since_s: float | None = None
    kernel: str = ""


def tell(seen: Sequence[Seen]) -> str:
    """Return who waits and who doesn't, in one sentence, equal ones together."""
    groups: dict[tuple[object, ...], list[Seen]] = {}
    for one in seen:
        standing = one.standing
        key = (standing.doing, standing.what, standing.place, standing.by, one.kernel)
        groups.setdefault(key if standing.doing is not Doing.IN_KERNEL else (one.rank,), []).append(
            one
        )
    ordered = sorted(
        groups.values(), key=lambda g: (g[0].standing.doing is not Doing.WAITS, -len(g))
    )
    return "; ".join(_tell_group(group) for group in ordered)


def _tell_group(group: Sequence[Seen]) -> str:
    first = group[0]
    ranks = [one.rank for one in group]
    single = len(ranks) == 1
    who = f"rank {ranks[0]} on {first.node}" if single else name_ranks(ranks)
    if first.standing.doing is Doing.WAITS:
        who = f"rank {ranks[0]}" if single else f"{len(ranks)} ranks"
        verb = "waits" if single else "wait"
        what = (
            f"{verb} {'for' if first.standing.what.startswith('`') else 'in'} {first.standing.what}"
        )
        return f"{who} {what}{_at(first.standing)}"
    times = [one.since_s for one in group if one.since_s is not None]
    how_long = f" for {max(times):.0f} s" if times else ""
    return f"{who} {describe(first.standing, first.kernel, single=single)}{how_long}"


def describe(standing: StackReading, kernel: str = "", *, single: bool = True) -> str:
    """Return what a rank does, as the end of a sentence: `is in read() (data.py:88)`."""
    is_, here = ("is" if single else "are"), _at(standing)
    inside = f" in {standing.what}{here}" if standing.what else here
    where = f", {standing.by}" if standing.by else ""
    match standing.doing:
        case Doing.STOPPED:
            whose = f"waits for {standing.by}, which is" if standing.by else is_
            return f"{whose} stopped (SIGSTOP){inside}"
        case Doing.IN_KERNEL:
            at = f" ({kernel})" if kernel else ""
            return f"{'sleeps' if single else 'sleep'} uninterruptibly in the kernel{at}{inside}"
        case Doing.DEBUGGED:
            return f"{is_} in a debugger{here}"
        case Doing.COMPILES | Doing.SAVES | Doing.EVALUATES:
            verb = standing.doing.value if single else standing.doing.value[:-1]
            return f"{verb}{inside}"
        case Doing.WAITS:
            return f"{'waits' if single else 'wait'}{inside}"
        case Doing.WORKS:
            return f"{is_}{inside}{where}" if inside else f"{is_} at work"
        case _:
            at = f" ({kernel})" if kernel else ""
            return f"{'does' if single else 'do'} not show a stack{at}"


def _at(standing: StackReading) -> str:
    return f" ({standing.place})" if standing.place else ""


def group_texts(texts: Sequence[tuple[str, str]]) -> list[str]:
    """Return lines with all stacks, equal ones once.

    Args:
        texts: Who, as `rank 3 on n1`, and the text.
    """
    groups: dict[str, list[str]] = {}
    for who, text in texts:
        groups.setdefault(re.sub(r"0x[0-9a-f]+", "", text), []).append(who)
    lines: list[str] = []
    for text, whose in groups.items():
        shown = ", ".join(whose[:_MOST_NAMED])
        if len(whose) > _MOST_NAMED:
            shown += f" and {len(whose) - _MOST_NAMED} more: {name_ranks(_ranks_in(whose))}"
        lines += [f"{shown}:", *(f"  {line}" for line in text.strip("\n").splitlines()), ""]
    return lines


def rank_first(lines: Sequence[str], rank: int) -> list[str]:
    """Return the lines of `group_texts` with the stack of a rank before all others, under a line of its own."""
    groups: list[list[str]] = []
    for line in lines:
        if not groups or (line and not line.startswith(" ")):
            groups.append([])
        groups[-1].append(line)
    for at, group in enumerate(groups):
        if rank in _named(group[0]):
            title = f"rank {rank} stands here:"
            rest = [line for other in (*groups[:at], *groups[at + 1 :]) for line in other]
            equal = [f"  (the same: {group[0].rstrip(':')})"] if len(_named(group[0])) > 1 else []
            return [title, *equal, *group[1:], *rest]
    return [f"rank {rank} shows no stack", "", *lines]


def _named(title: str) -> set[int]:
    """Return the ranks that the title of a group names, all of them also where it counts the most."""
    _, more, all_of_them = title.rpartition(" more: ")
    if not more:
        return _ranks_in([title])
    pieces = re.findall(r"(\d+)(?:-(\d+))?", all_of_them)
    return {rank for first, last in pieces for rank in range(int(first), int(last or first) + 1)}


def _ranks_in(texts: Sequence[str]) -> set[int]:
    return {int(number) for text in texts for number in re.findall(r"\brank (\d+) on ", text)}
