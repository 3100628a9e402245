"""Rules about how nodes find each other: endpoint, rendezvous id, node rank, ports.

`RULES` lists them.
"""

import re
from collections.abc import Iterator

from torchmuster.diagnose.finding import Finding
from torchmuster.diagnose.lint.job import Scheduler, is_node_count, number
from torchmuster.diagnose.lint.shell import shown, variables_of
from torchmuster.diagnose.lint.starts import (
    Rule,
    ScriptStart,
    ScriptView,
    tasks_per_node,
    uses_part_of_nodes,
)
from torchmuster.launcher.spec.rendezvous import DEFAULT_C10D_PORT, DEFAULT_STATIC_PORT

LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d+){3}|\[?::1\]?|0\.0\.0\.0)(?::.*)?", re.IGNORECASE)
_OWN_VALUE = re.compile(
    r"\$\{?RANDOM|\$\(\s*(?:date|uuidgen|mktemp|shuf|hostname)\b|\$\$|\$\{?(?:SLURM_PROCID|SLURM_NODEID|HOSTNAME)\b"
)
_OWN_NAME = re.compile(r"\$\(\s*hostname\b[^)]*\)|\$\{?HOSTNAME\b\}?|\$\{?SLURMD_NODENAME\b\}?")
_GUESSES = {
    "first-address": re.compile(r"hostname\s+(?:-I|--all-ip-addresses)\b"),
    "own-address": re.compile(r"hostname\s+(?:-i|--ip-address)\b"),
    "falls-back": re.compile(r"\|\|\s*echo\s+[\"']?(?:localhost|127\.)"),
}
_RANKS = frozenset({"SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "PBS_NODENUM", "PMI_RANK"})
_RANKS |= {"OMPI_COMM_WORLD_RANK"}
SPREAD = frozenset({"srun", "mpiexec", "mpirun", "pdsh", "clush", "aprun", "jsrun", "ibrun"})
_HEAD = {
    Scheduler.SLURM: "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)",
    Scheduler.PBS: "$(head -n 1 $PBS_NODEFILE)",
    Scheduler.NONE: "NAME_OF_THE_HEAD",
}
_ONE_ID = {
    Scheduler.SLURM: "$SLURM_JOB_ID, filled in by the job script",
    Scheduler.PBS: "$PBS_JOBID, filled in by the job script",
    Scheduler.NONE: "1, the same on all nodes",
}
_FREE_PORT = {
    Scheduler.SLURM: "MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
    Scheduler.PBS: "take a free port on the head, in the job script",
    Scheduler.NONE: "another port",
}


def _each_node_evaluates(view: ScriptView, start: ScriptStart) -> bool:
    """Return whether a shell on every node expands the line's variables."""
    by_hand = view.job.scheduler is Scheduler.NONE and start.wrapper is None
    return start.on_nodes or (by_hand and view.is_wide(start))


def _text_on_nodes(view: ScriptView, start: ScriptStart, text: str) -> str:
    """Return the part of a text that each node expands itself; empty when none does."""
    if start.on_nodes:
        return text
    return view.job.shell.expand(text, start.line) if _each_node_evaluates(view, start) else ""


def _has_a_turn_for_each_node(view: ScriptView, start: ScriptStart) -> bool:
    """Return whether the line is in a loop over nodes, not over settings for all nodes."""
    to_one = start.wrapper in ("ssh", "pbsdsh") or uses_part_of_nodes(start, view.job)
    return start.command.looped and start.wrapper is not None and to_one


def _endpoint(view: ScriptView, start: ScriptStart) -> str | None:
    """Return the text of the rendezvous address; None when it is unknown."""
    if start.given is None:
        found = view.job.shell.assignment_of("MASTER_ADDR", start.line)
        return found.value if found is not None and start.kind == "python" else None
    if start.given.standalone:
        return None
    if start.given.rdzv_endpoint:
        return str(start.given.rdzv_endpoint)
    return str(start.given.master_addr) if start.given.rdzv_backend == "static" else None


def rdzv_id(view: ScriptView) -> Iterator[Finding]:
    """Report an `--rdzv_id` that differs between nodes: `$RANDOM` in a shell that each node runs.

    If the job script itself expands it, all nodes get one value, which is fine.

    Source: failures R04.
    """
    for start in view.starts:
        if start.given is None or start.given.standalone or not view.is_wide(start):
            continue
        by_turns = _has_a_turn_for_each_node(view, start)
        text = start.given.rdzv_id if by_turns else _text_on_nodes(view, start, start.given.rdzv_id)
        match = _OWN_VALUE.search(text)
        if match is not None:
            words = {"given": shown(start.given.rdzv_id), "fix": _ONE_ID[view.job.scheduler]}
            yield view.finding("rdzv-id", start, **words)


def own_endpoint(view: ScriptView) -> Iterator[Finding]:
    """Report an endpoint that is the evaluating node's own name, if every node evaluates it.

    Source: failures R05.
    """
    for start in view.starts:
        text = _endpoint(view, start)
        if text is None or not view.is_wide(start):
            continue
        if _OWN_NAME.search(_text_on_nodes(view, start, text)):
            head = _HEAD[view.job.scheduler]
            yield view.finding("own-endpoint", start, text=shown(text), head=head)


def loopback(view: ScriptView) -> Iterator[Finding]:
    """Report localhost as the rendezvous address: each node waits alone.

    Source: failures R06, R20; a lost default of --rdzv-endpoint and --master-addr is localhost.
    """
    for start in view.starts:
        if not view.is_wide(start) or start.partial or _is_set_by_pet(view):
            continue
        if start.muster and view.job.scheduler is not Scheduler.NONE:
            continue  # muster asks the scheduler for the first node
        if (
            start.given is not None
            and start.given.rdzv_backend == "c10d"
            and not start.given.rdzv_endpoint
        ):
            if not start.given.standalone:
                named = any("master" in word for word in start.words)
                yield view.finding("master-without-effect" if named else "no-endpoint", start)
            continue
        text = _endpoint(view, start)
        if text is None or not LOOPBACK.fullmatch(
            shown(view.job.shell.expand(text, start.line)).strip()
        ):
            continue
        said = start.given is None or start.given.rdzv_endpoint or "master" in " ".join(start.words)
        head = _HEAD[view.job.scheduler]
        yield view.finding("loopback" if said else "no-address", start, head=head)


def _is_set_by_pet(view: ScriptView) -> bool:
    """Return whether torchrun's PET_* variables give the options."""
    return any(a.name.startswith("PET_") for a in view.job.shell.assignments)


def guessed_address(view: ScriptView) -> Iterator[Finding]:
    """Report an endpoint from `hostname -I | awk`, `hostname -i` or a fallback to localhost.

    The first address may be that of a management network or of docker, and torchrun may not
    recognize it as its own; `hostname -i` is 127.0.1.1 on some systems.

    Source: failures R08, R09, R06, P07.
    """
    seen: set[int] = set()
    for start in view.starts:
        text = _endpoint(view, start)
        if text is None or not view.is_wide(start):
            continue
        places = [(start.line, text)]
        places += [(a.line, a.value) for a in view.job.shell.sources(text, start.line)]
        for line, value in places:
            name = next((name for name, guess in _GUESSES.items() if guess.search(value)), None)
            if name is not None and line not in seen:
                seen.add(line)
                yield view.finding(name, line)


def node_rank(view: ScriptView) -> Iterator[Finding]:
    """Report the same `--node_rank` on every node: a number, or a variable expanded too early.

    With the c10d backend torchrun ignores it.

    Source: failures R18; torch/distributed/elastic/rendezvous/dynamic_rendezvous.py.
    """
    for start in view.starts:
        if start.given is None or start.wrapper not in SPREAD or start.given.standalone:
            continue
        if start.partial or not view.is_wide(start) or uses_part_of_nodes(start, view.job):
            continue
        text, static = start.given.node_rank, start.given.rdzv_backend == "static"
        said = any(re.match(r"--node[-_]rank", word) for word in start.words)
        early = is_too_early(view, start, text)
        if not static and said:
            yield view.finding("rank-without-effect", start)
        elif static and (early or number(text, view.job, start.line) is not None):
            what = f"every node gets --node_rank={shown(text)}"
            yield view.finding(
                "node-rank-early" if early else "node-rank",
                start,
                what=what if said else "no node gets its --node_rank",
                head=_HEAD[view.job.scheduler],
            )


def is_too_early(view: ScriptView, start: ScriptStart, text: str) -> bool:
    """Return whether the job script itself expands a variable that only a started process has."""
    text = view.job.shell.expand(text, start.line)
    if start.on_nodes:
        text = text.replace("$", "")
    return bool(_RANKS & set(variables_of(text)))


def world_size(view: ScriptView) -> Iterator[Finding]:
    """Report a WORLD_SIZE that is the number of nodes instead of the number of workers.

    A script that srun starts once for each GPU then has ranks that exceed the world size; torchrun
    sets the variable itself.

    Source: torch.distributed, "Environment variable initialization"; the seed of a published
    tutorial.
    """
    many = [s for s in view.starts if s.kind == "python" and (tasks_per_node(s, view.job) or 1) > 1]
    for given in view.job.shell.assignments:
        if given.name != "WORLD_SIZE" or not is_node_count(given.value, view.job, given.line):
            continue
        if many and (given.exported or given.name in view.job.shell.exports):
            yield view.finding("world-size-of-nodes", given, other=many[0].line)
        elif any(start.by_torchrun for start in view.starts):
            yield view.finding("world-size-for-nobody", given)


def fixed_port(view: ScriptView) -> Iterator[Finding]:
    """Report a fixed port if jobs may share a node, or if two lines of a script use the same port.

    Source: failures R15, R16.
    """
    taken: dict[int, int] = {}
    for start in view.starts:
        port = _port(view, start)
        if not port:
            continue
        if view.job.allocation.is_shared is not None:
            fix = _FREE_PORT[view.job.scheduler]
            if not view.is_wide(start) and start.given is not None:
                fix = "--standalone takes a free port"
            yield view.finding("fixed-port", start, port=port, fix=fix)
        elif start.wrapper is None and start.command.background:
            if port in taken:
                yield view.finding("port-taken", start, port=port, other=taken[port])
            taken.setdefault(port, start.line)


def _port(view: ScriptView, start: ScriptStart) -> int | None:
    """Return the port of a start; 0 or None when it is not a fixed number."""
    if start.given is None:
        found = view.job.shell.assignment_of("MASTER_PORT", start.line)
        fixed = found is not None and start.kind == "python"
        return number(found.value, view.job, start.line) if found is not None and fixed else None
    if start.given.standalone or start.partial or _is_set_by_pet(view):
        return None
    static = start.given.rdzv_backend == "static"
    if start.muster and _takes_a_free_port(view, start):
        return None
    if start.given.rdzv_endpoint:
        text = view.job.shell.expand(start.given.rdzv_endpoint, start.line)
        match = re.search(r":(\d{1,5})$", text)
        if match is None and ":" in text:
            return None
        return int(match[1]) if match else DEFAULT_STATIC_PORT if static else DEFAULT_C10D_PORT
    if not static:
        return DEFAULT_C10D_PORT
    port = start.given.master_port  # without one, torchrun before 2.13 takes 29500 on one node too
    return DEFAULT_STATIC_PORT if port is None else number(port, view.job, start.line)


def _takes_a_free_port(view: ScriptView, start: ScriptStart) -> bool:
    """Return whether `muster torchrun` takes a free port: one node, no endpoint, no port."""
    if start.given is None or start.given.rdzv_endpoint:
        return False
    nodes = number(start.given.nnodes.rpartition(":")[2], view.job, start.line)
    return nodes == 1 and (start.given.rdzv_backend != "static" or start.given.master_port is None)


RULES: tuple[Rule, ...] = (
    rdzv_id,
    own_endpoint,
    loopback,
    guessed_address,
    node_rank,
    world_size,
    fixed_port,
)
