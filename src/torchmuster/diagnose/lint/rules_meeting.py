"""Rules about how nodes find each other: endpoint, rendezvous id, node rank, ports.

`RULES` lists them.
"""

import re
from collections.abc import Iterator

from torchmuster.diagnose.lint.job import Scheduler, is_node_count, number
from torchmuster.diagnose.lint.shell import shown, variables_of
from torchmuster.diagnose.lint.starts import (
    LintFinding,
    Rule,
    ScriptStart,
    ScriptView,
    error,
    note,
    tasks_per_node,
    uses_part_of_nodes,
    warning,
)
from torchmuster.launcher.spec.rendezvous import DEFAULT_C10D_PORT, DEFAULT_STATIC_PORT

LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d+){3}|\[?::1\]?|0\.0\.0\.0)(?::.*)?", re.IGNORECASE)
_OWN_VALUE = re.compile(
    r"\$\{?RANDOM|\$\(\s*(?:date|uuidgen|mktemp|shuf|hostname)\b|\$\$|\$\{?(?:SLURM_PROCID|SLURM_NODEID|HOSTNAME)\b"
)
_OWN_NAME = re.compile(r"\$\(\s*hostname\b[^)]*\)|\$\{?HOSTNAME\b\}?|\$\{?SLURMD_NODENAME\b\}?")
_ALL_ADDRESSES = re.compile(r"hostname\s+(?:-I|--all-ip-addresses)\b")
_ONE_ADDRESS = re.compile(r"hostname\s+(?:-i|--ip-address)\b")
_FALLS_BACK = re.compile(r"\|\|\s*echo\s+[\"']?(?:localhost|127\.)")
_RANKS = frozenset({"SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "PBS_NODENUM", "PMI_RANK"})
_RANKS |= {"OMPI_COMM_WORLD_RANK"}
SPREAD = frozenset({"srun", "mpiexec", "mpirun", "pdsh", "clush", "aprun", "jsrun", "ibrun"})
_HEAD = {
    Scheduler.SLURM: "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)",
    Scheduler.PBS: "$(head -n 1 $PBS_NODEFILE)",
    Scheduler.NONE: "NAME_OF_THE_HEAD",
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
        found = view.job.shell.value_of("MASTER_ADDR", start.line)
        return found.value if found is not None and start.kind == "python" else None
    if start.given.standalone:
        return None
    if start.given.rdzv_endpoint:
        return str(start.given.rdzv_endpoint)
    return str(start.given.master_addr) if start.given.rdzv_backend == "static" else None


def rdzv_id(view: ScriptView) -> Iterator[LintFinding]:
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
            what = f"--rdzv_id={shown(start.given.rdzv_id)} is different on every node"
            why = "all nodes reach the store, and each waits in a rendezvous of its own"
            job_id = "$PBS_JOBID" if view.job.scheduler is Scheduler.PBS else "$SLURM_JOB_ID"
            fix = "--rdzv_id=1, the same on all nodes"
            if view.job.scheduler is not Scheduler.NONE:
                fix = f"--rdzv_id={job_id}, filled in by the job script"
            yield error("rdzv-id", start.line, what, why, fix)


def own_endpoint(view: ScriptView) -> Iterator[LintFinding]:
    """Report an endpoint that is the evaluating node's own name, if every node evaluates it.

    Source: failures R05.
    """
    for start in view.starts:
        text = _endpoint(view, start)
        if text is None or not view.is_wide(start):
            continue
        if _OWN_NAME.search(_text_on_nodes(view, start, text)):
            what = f"every node considers itself the head: {shown(text)}"
            why = "each one opens its own store and waits there alone"
            yield error(
                "own-endpoint",
                start.line,
                what,
                why,
                f"use the same name on all nodes: {_HEAD[view.job.scheduler]}",
            )


def loopback(view: ScriptView) -> Iterator[LintFinding]:
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
                yield _without_endpoint(start)
            continue
        text = _endpoint(view, start)
        if text is None or not LOOPBACK.fullmatch(
            shown(view.job.shell.expand(text, start.line)).strip()
        ):
            continue
        said = start.given is None or start.given.rdzv_endpoint or "master" in " ".join(start.words)
        what = (
            "the nodes use localhost as the rendezvous address"
            if said
            else "the line gives no rendezvous address"
        )
        why = (
            "localhost is a different machine on every node"
            if said
            else "without an address torchrun takes 127.0.0.1"
        )
        fix = f"--rdzv_backend=c10d --rdzv_endpoint={_HEAD[view.job.scheduler]}"
        yield error("loopback", start.line, what, why, fix)


def _is_set_by_pet(view: ScriptView) -> bool:
    """Return whether torchrun's PET_* variables give the options."""
    return any(a.name.startswith("PET_") for a in view.job.shell.assignments)


def _without_endpoint(start: ScriptStart) -> LintFinding:
    what = "c10d is used without --rdzv_endpoint"
    why = "without it each node waits alone at localhost"
    if any("master" in word for word in start.words):
        what = "--master_addr has no effect with the c10d backend"
        why = "it is for the static backend; without --rdzv_endpoint each node waits alone at localhost"
    return error("loopback", start.line, what, why, "--rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT")


def guessed_address(view: ScriptView) -> Iterator[LintFinding]:
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
            found = _guess(line, value)
            if found is not None and line not in seen:
                seen.add(line)
                yield found


def _guess(line: int, value: str) -> LintFinding | None:
    name = "give the head's name, and let `muster torchrun` find the address that other nodes reach"
    if _ALL_ADDRESSES.search(value):
        what = "the endpoint is the first address that `hostname -I` prints"
        why = "it may be of a network that the other nodes don't reach, or one that torchrun does not know as its own"
        return warning("first-address", line, what, why, name)
    if _ONE_ADDRESS.search(value):
        what = "the endpoint comes from `hostname -i`"
        why = "it is what the node's own name resolves to, on some systems 127.0.1.1: then each node waits alone"
        return warning("own-address", line, what, why, name)
    if _FALLS_BACK.search(value):
        what = "the endpoint falls back to localhost"
        why = "when the command before it fails, every node waits alone, without a message"
        return warning(
            "falls-back", line, what, why, "end the script in this case: ${HEAD:?no head}"
        )
    return None


def node_rank(view: ScriptView) -> Iterator[LintFinding]:
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
            why = "c10d numbers the nodes by itself, by their names"
            yield note(
                "node-rank", start.line, "--node_rank has no effect with c10d", why, "leave it out"
            )
        elif static and (early or number(text, view.job, start.line) is not None):
            yield _same_rank(view, start, said=said, early=early)


def is_too_early(view: ScriptView, start: ScriptStart, text: str) -> bool:
    """Return whether the job script itself expands a variable that only a started process has."""
    text = view.job.shell.expand(text, start.line)
    if start.on_nodes:
        text = text.replace("$", "")
    return bool(_RANKS & set(variables_of(text)))


def _same_rank(view: ScriptView, start: ScriptStart, *, said: bool, early: bool) -> LintFinding:
    text = start.given.node_rank if start.given is not None else ""
    what = f"every node gets --node_rank={shown(text)}" if said else "no node gets its --node_rank"
    why = "the static backend uses the number unchanged: all nodes are the head, and wait for the others"
    if early:
        why = "the job script expands the variable before srun starts, where it is 0 or empty"
    head = _HEAD[view.job.scheduler]
    fix = f"--rdzv_backend=c10d --rdzv_endpoint={head}: it needs no rank"
    return error("node-rank", start.line, what, why, fix)


def world_size(view: ScriptView) -> Iterator[LintFinding]:
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
        what = "WORLD_SIZE holds the number of nodes, not of workers"
        if many and (given.exported or given.name in view.job.shell.exports):
            why = f"line {many[0].line} starts several workers on each node: their ranks exceed the world size"
            yield error(
                "world-size-of-nodes", given.line, what, why, "export WORLD_SIZE=$SLURM_NTASKS"
            )
        elif any(start.by_torchrun for start in view.starts):
            why = "torchrun sets it for its workers, so only this script reads it: the name is misleading"
            yield note("world-size-of-nodes", given.line, what, why, "call it NNODES")


def fixed_port(view: ScriptView) -> Iterator[LintFinding]:
    """Report a fixed port if jobs may share a node, or if two lines of a script use the same port.

    Source: failures R15, R16.
    """
    taken: dict[int, int] = {}
    for start in view.starts:
        port = _port(view, start)
        if not port:
            continue
        if view.job.allocation.is_shared is not None:
            what = f"port {port} is fixed, and several of these jobs may share a node (line {view.job.allocation.is_shared})"
            why = "the second one ends with `address already in use`, or connects to the first"
            fix = _FREE_PORT[view.job.scheduler]
            if not view.is_wide(start) and start.given is not None:
                fix = "--standalone takes a free port"
            yield warning("fixed-port", start.line, what, why, fix)
        elif start.wrapper is None and start.command.background:
            if port in taken:
                what = f"port {port} is used already by the torchrun of line {taken[port]}"
                why = "both run at the same time on one node"
                yield error("fixed-port", start.line, what, why, "--standalone takes a free port")
            taken.setdefault(port, start.line)


def _port(view: ScriptView, start: ScriptStart) -> int | None:
    """Return the port of a start; 0 or None when it is not a fixed number."""
    if start.given is None:
        found = view.job.shell.value_of("MASTER_PORT", start.line)
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
