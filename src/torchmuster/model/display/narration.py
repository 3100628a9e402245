"""Events in words: turns lines of `events.jsonl` into sentences for people."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from torchmuster.model.display.text import few_of
from torchmuster.model.network import significant

if TYPE_CHECKING:
    from torchmuster.model.display.repeats import Shown


def narrate(name: str, fields: Mapping[str, Any], shown: "Shown | None" = None) -> str | None:
    """Return the sentence for an event; None for one that is only recorded.

    Args:
        name: Of the event.
        fields: Of the event.
        shown: What the terminal shows already and need not be repeated.
    """
    if name == "attempt_failed":
        return _attempt_failed(fields, shown)
    teller = _TELLERS.get(name)
    return teller(fields) if teller is not None else None


_WAITS = ("waiting", "waiting_for_end")
_WAITS_NO_MORE = ("attempt_started", "run_ended")


def narrate_wait(events: Sequence[Mapping[str, Any]], now: datetime) -> str | None:
    """Return what a run waits for at the end of its record, with the remaining time; None if it does not wait."""
    for event in reversed(events):
        if event.get("event") in _WAITS_NO_MORE:
            return None
        if event.get("event") in _WAITS:
            fields = dict(event)
            if "left_s" in fields:
                age_s = (now - datetime.fromisoformat(str(event["time"]))).total_seconds()
                fields["left_s"] = max(0.0, fields["left_s"] - max(0.0, age_s))
            return narrate(str(event["event"]), fields)
    return None


def _waiting(f: Mapping[str, Any]) -> str:
    missing, num_missing, left = f["missing"], f["num_missing"], f"{f['left_s']:.0f} s left"
    if f.get("hint"):
        names = few_of([m["node"] for m in missing], 8, num_missing)
        return f"waiting for {names}: {missing[0]['why'] if missing else ''}; {f['hint']}; {left}"
    what = few_of([f"{m['node']} ({m['why']})" for m in missing], 8, num_missing)
    return f"waiting for {num_missing} of {f['wanted']} nodes: {what}; {left}"


def _attempt_started(f: Mapping[str, Any]) -> str | None:
    if f["attempt"] == 0 and not f.get("verbose"):
        return None
    nodes = "node" if f["num_nodes"] == 1 else "nodes"
    workers = "worker" if f["world_size"] == 1 else "workers"
    return (
        f"attempt {f['attempt']}: {f['world_size']} {workers} on {f['num_nodes']} {nodes}"
        f" ({f['why']})"
    )


def _attempt_failed(f: Mapping[str, Any], shown: "Shown | None") -> str:
    left = f["restarts_left"]
    what = f"attempt {f['attempt']} ended: {f['what']}"
    if left is None:
        return what  # the verdict follows
    rank = f["cause"]["rank"]
    traceback = (f["cause"].get("error") or {}).get("traceback", "")
    ranks = shown.ranks if shown is not None else {0}
    is_new = rank not in ranks and not (shown is not None and shown.has(traceback))
    lines = f["cause"]["tail"] if is_new else []
    if shown is not None and 0 < len(traceback.splitlines()) <= len(lines):
        shown.note(traceback)
    told = "".join(f"\n  [rank {rank}] {line}" for line in lines)
    return f"{what}; {left} restart{'s' if left != 1 else ''} left{told}"


def _refused(f: Mapping[str, Any]) -> str:
    return f"refused an agent from {f['host']}: {f['why']}; the run continues"


def _early_end(f: Mapping[str, Any]) -> str:
    ranks = f"rank{'' if f['ranks'].isdecimal() else 's'} {f['ranks']}"
    return (
        f"{ranks} ended with exit code 0 while {f['num_running']}"
        f" other{'s run' if f['num_running'] > 1 else ' runs'}"
    )


def _network(f: Mapping[str, Any]) -> str:
    parts = [f"{f['interface']} ({f['subnet']})", f"{f['num_nodes']} nodes"]
    if f["gbit_per_s"] is not None:
        parts.append(f"{f['gbit_per_s']} Gbit/s")
    if f["latency_s"] is not None:
        parts.append(f"{significant(f['latency_s'] * 1000)} ms")
    unused = [f"{u['name']} ({u['why']})" for u in f["unused"][:8]]
    if len(f["unused"]) > 8:
        unused.append(f"{len(f['unused']) - 8} more")
    return f"network: {', '.join(parts)}" + (f"; not used: {', '.join(unused)}" if unused else "")


def _preflight(f: Mapping[str, Any]) -> str | None:
    """Return the sentence for failures and warnings; `muster doctor` shows all findings itself."""
    if f["form"] == "long":
        return None
    lines = [_finding(finding) for finding in f["findings"] if finding["level"] != "note"]
    return "\n".join(lines) or None


def _finding(finding: Mapping[str, Any]) -> str:
    because = "; ".join(finding["because"][:2])
    hint = finding["hint"]
    text = f"preflight {finding['level']}: {finding['error']}"
    text += f" ({because})" if because else ""
    return text + (f"; {hint}" if hint else "")


def _left_running(f: Mapping[str, Any]) -> str:
    names = [f"{process['name']} (pid {process['pid']})" for process in f["processes"]]
    return f"left running on {f['node']}, in sessions of their own: {few_of(names, 8)}"


_TELLERS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "waiting": _waiting,
    "attempt_started": _attempt_started,
    "agent_refused": _refused,
    "left_running": _left_running,
    "early_end": _early_end,
    "network": _network,
    "preflight": _preflight,
    "node_lost": lambda f: f"{f['node']} was lost: {f['why']}",
    "spare_joined": lambda f: f"{f['node']} has joined as a spare node",
    "spare_lost": lambda f: f"the spare {f['node']} was lost: {f['why']}",
    "node_left_out": lambda f: (
        f"{f['node']} gets no ranks again: its rank {f['rank']} has computed something else than the others"
    ),
    "head_replaced": lambda f: (
        f"the head on {f['before']} was lost: {f['node']} takes its place with attempt {f['attempt']}"
    ),
    "spare_taken": lambda f: f"the spare {f['node']} takes the place of {f['before']}",
    "newcomer": lambda f: f"{f['node']} has joined; it takes part from the next attempt on",
    "debugger_waits": lambda f: (
        f"rank {f['rank']} on {f['node']} waits for {f['tool'].partition(':')[0]}"
    ),
    "notice": lambda f: f["text"] or None,
    "stopping": lambda f: f["text"],
    "hang": lambda f: f["text"],
    "start_wait": lambda f: f["text"],
    "straggler": lambda f: f["text"],
    "waiting_for_end": lambda f: f["text"],
    "shrunk": lambda f: f"the world shrinks to {f['num_nodes']} of {f['wanted']} nodes",
}
