"""OpenPBS and PBS Professional: qsub, qstat, qdel, pbsdsh. Both give the same answers.

Facts marked "recorded" were observed with an OpenPBS 23.06 server; a test keeps each answer.
"""

import json
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchmuster.core.model.links import ResubmitMethod
from torchmuster.core.model.verdict import Report
from torchmuster.errors import UsageError
from torchmuster.launcher.engines import base
from torchmuster.launcher.engines.base import (
    EngineError,
    NodeQuestion,
    NodeStart,
    Queue,
    QueueQuestion,
)
from torchmuster.launcher.engines.wait_reasons import read_scheduler_texts
from torchmuster.launcher.model.job import (
    AllocatedNode,
    Allocation,
    JobRequest,
    JobState,
    JobView,
    NodeChunk,
    NodeLauncher,
)

# Sentences for PBS's comment on a waiting job, and what its hosts have.
#
# Source: OpenPBS, src/scheduler/job_info.c and constant.h; observed in version 23.06.


def capacity_argv(job_id: str) -> list[list[str]]:
    """Return the commands that show what a job asks for and what the hosts have."""
    return [["qstat", "-f", "-F", "json", job_id], ["pbsnodes", "-a"]]


def shortage(answers: Sequence[str]) -> str | None:
    """Return what the hosts have if no host has enough CPUs, or PBS says the job can never run."""
    job, hosts = answers if len(answers) == 2 else ("", "")
    counts = Counter(_cpus_of_hosts(hosts).values())
    select = re.search(r'"select":\s*"([^"]*)"', job)
    asked = [int(text) for text in re.findall(r"\bncpus=(\d+)", select[1] if select else "")]
    is_too_large = max(asked, default=0) > max(counts, default=0)
    if not counts or not (is_too_large or "Can Never Run" in job):
        return None
    sizes = [
        f"{counts[n]} host{'s' if counts[n] != 1 else ''} of {n} CPUs"
        for n in sorted(counts, reverse=True)
    ]
    more = f"; the job asks for {max(asked)} on one host" if is_too_large else ""
    return f"this PBS has {' and '.join(sizes)}{more}"


def _cpus_of_hosts(text: str) -> Counter[str]:
    """Return the CPUs of each host, over all its vnodes: a chunk may span several of them."""
    found: Counter[str] = Counter()
    for number, block in enumerate(re.split(r"\n(?=\S)", text)):
        known = dict(re.findall(r"resources_available\.(host|ncpus) = (\S+)", block))
        if known.get("ncpus", "").isdecimal():
            found[known.get("host", str(number))] += int(known["ncpus"])
    return found


REASONS, REFUSALS = read_scheduler_texts(
    os.path.join(os.path.dirname(__file__), "pbs.txt"), "(?i){}", capacity_argv, shortage
)


def _is_lost(stdout: str, node: str) -> str | None:
    """Return the state of a node that is down, else None.

    Source: `man pbsnodes`, states; recorded from 23.06.
    """
    name, _, attributes = stdout.partition("\n")
    state = re.search(r"^\s+state = (\S+)", attributes, re.MULTILINE)
    if state is None or name.strip() != node or "down" not in state[1].split(","):
        return None
    return f"its state is {state[1]}"


LOST_NODE = NodeQuestion(
    argv_for=lambda _, node: [["pbsnodes", node]], is_lost=_is_lost, outlives=False
)


# Parsing of `qstat -f`, as JSON or as text with wrapped lines, into a dictionary per job.
#
# PBS prints JSON with its own code, so invalid parts are mended first: `007` and `1.` without
# quotes, lone backslashes, tabs and newlines in values, repeated keys, a line after the end.


_MAX_DEPTH = 32
_BARE = re.compile(r'("(?:[^"\\]|\\.)*")|(?<=[:\s])([-+]?[0-9.][^\s,{}\[\]":]*)(?=\s*[,}\]])')
_LONE_BACKSLASH = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')


def read_jobs(stdout: str) -> dict[str, dict[str, Any]]:
    """Return the fields of jobs by id; JSON nests `Resource_List`, text has `Resource_List.x`.

    Raises:
        ValueError: The output has neither form.
    """
    text = stdout.strip()
    if not text:
        return {}
    if re.search(r"^Job Id: ", text, re.MULTILINE):
        return _from_text(text)
    if "{" in text:
        return _from_json(text[text.index("{") :])
    raise ValueError("it is neither JSON nor text")


def _from_json(text: str) -> dict[str, dict[str, Any]]:
    if re.search(r"[\[{]\s*" * _MAX_DEPTH, text):
        raise ValueError("it is nested too deeply")
    try:
        found = _decode(text)
    except ValueError:
        mended = _LONE_BACKSLASH.sub(lambda m: m[0] if m[1] else r"\\", text)
        found = _decode(_BARE.sub(_quote, mended))
    jobs = found.get("Jobs", {}) if isinstance(found, dict) else None
    if not isinstance(jobs, dict) or not all(isinstance(job, dict) for job in jobs.values()):
        raise ValueError("it holds no jobs")
    return jobs


def _decode(text: str) -> Any:
    # strict=False: control characters in a value; raw_decode: text after the end.
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=_merge)
    return decoder.raw_decode(text)[0]


def _merge(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; merge tables of one name: some servers repeat `Jobs` for each job."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        known = found.get(key)
        both = isinstance(known, dict) and isinstance(value, dict)
        found[key] = {**known, **value} if both and isinstance(known, dict) else value
    return found


def _quote(match: re.Match[str]) -> str:
    """Quote values that begin like a number but are none in JSON: `007`, `1.`, `2:00`."""
    if match[1] is not None:
        return match[1]
    word = match[2]
    return word if re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", word) else f'"{word}"'


def _from_text(text: str) -> dict[str, dict[str, Any]]:
    jobs: dict[str, dict[str, Any]] = {}
    fields: dict[str, Any] | None = None
    last = ""
    for line in text.splitlines():
        if line.startswith("Job Id: "):
            fields = jobs.setdefault(line.removeprefix("Job Id: ").strip(), {})
            last = ""
        elif fields is None:
            continue  # the site's own output before the jobs
        elif line.startswith("\t") and last:
            fields[last] += line[1:]  # qstat wraps long values and begins the rest with a tab
        elif (match := re.fullmatch(r" +([A-Za-z_][\w.@-]*) = ?(.*)", line)) is not None:
            last = match[1]
            fields[last] = match[2]
    return jobs


def parse_qstat(text: str) -> tuple[Queue, ...]:
    """Parse `qstat -Q`: name, limit, total, enabled, started, ..., type; also of routes."""
    found: list[Queue] = []
    for line in text.splitlines():
        cells = line.split()
        if len(cells) < 6 or cells[3] not in ("yes", "no") or cells[4] not in ("yes", "no"):
            continue
        name, _, number, enabled, started = cells[:5]
        is_open, starts = enabled == "yes", started == "yes"
        found.append(Queue(name=name, is_open=is_open, starts=starts, about=f"{number} jobs"))
    return tuple(found)


def mark_default(queues: Sequence[Queue], text: str) -> tuple[Queue, ...]:
    """Mark the queue that `qstat -B -f` names as the default: `default_queue = workq`."""
    match = re.search(r"^\s*default_queue = (\S+)", text, re.MULTILINE)
    name = match[1] if match else None
    return tuple(replace(queue, is_default=queue.name == name) for queue in queues)


QUEUES_OF_PBS = QueueQuestion(
    argv=("qstat", "-Q"),
    parse=parse_qstat,
    default_argv=("qstat", "-B", "-f"),  # only the server's record names the default queue
    mark_default=mark_default,
)


# Source: PBS Professional Reference Guide, "Job States"; Q, R, H and F recorded.
STATES = {
    letter: state
    for state, letters in {
        JobState.PENDING: "QTW",  # T: on its way to another server; W: waits for a time
        JobState.UNKNOWN: "M",  # moved: only the other server knows its state
        JobState.HELD: "H",
        JobState.SUSPENDED: "SU",  # U: the workstation's user is active
        JobState.RUNNING: "RB",
        JobState.ENDING: "E",
    }.items()
    for letter in letters
}
# Source: openpbs src/include/job.h, JOB_EXEC_*; -29 recorded.
_END_CODES = {
    -29: JobState.TIMED_OUT,
    -28: JobState.TIMED_OUT,  # CPU time
    -27: JobState.OUT_OF_MEMORY,
    -26: JobState.OUT_OF_MEMORY,  # vmem
}
_DELETED = "91"  # substate; Source: openpbs src/include/job.h, JOB_SUBSTATE_TERMINATED; recorded
_TIMES = ("Resource_List", "resources_used")
_CLOCKS_DIFFER_S = 300.0


class PbsDialect:
    """OpenPBS 20 and later, PBS Professional 19 and later."""

    name = "pbs"
    wait_reasons = REASONS
    lost_node = LOST_NODE
    queues = QUEUES_OF_PBS
    refusals = REFUSALS
    # qrerun needs an operator's rights at most sites.
    resubmit_methods: tuple[ResubmitMethod, ...] = (ResubmitMethod.SUBMIT, ResubmitMethod.REQUEUE)
    launchers = (NodeLauncher.PBSDSH, NodeLauncher.MPIEXEC, NodeLauncher.TMRSH, NodeLauncher.SSH)
    array_variable = "PBS_ARRAY_INDEX"

    def script(self, job: JobRequest) -> str:
        """Return the complete job script."""
        # 230 letters since PBS 13, but longer names are unreadable in qstat.
        ours = [f"-N {base.clean_name(job.name, 63)}", "-S /bin/bash", "-j oe"]
        if base.is_plain_path(_log_path(job)):
            ours.append(f"-o {_log_path(job)}")
        # Written in place, so that the log is live; recorded: else it stays in the host's spool
        # until the end.
        ours += ["-k oed", f"-r {'y' if job.requeue else 'n'}"]
        if job.outlives_nodes:
            ours.append("-W tolerate_node_failures=all")
        # A sum of chunks, each on its own host.
        is_one_kind = len(job.chunks) == 1
        words = [_chunk(one, job.num_nodes if is_one_kind else one.num_nodes) for one in job.chunks]
        ours += [f"-l select={'+'.join(words)}", "-l place=scatter"]
        if job.time_limit_s is not None:
            ours.append(f"-l walltime={_clock(job.time_limit_s)}")
        # Source: PBS Professional Reference Guide, "qsub".
        named = (("-q", "queue", job.queue), ("-A", "account", job.account))
        ours += [f"{word} {base.check_value(text, key)}" for word, key, text in named if text]
        lines = ["#!/bin/bash -l", *base.assemble("PBS", ours, job.directives)]
        return "\n".join([*lines, *base.body(job), ""])

    def submit_argv(self, job: JobRequest, script_path: str) -> list[str]:
        """Return the qsub command."""
        argv = ["qsub"]
        if job.array is not None:
            limit = f"%{job.array.parallel}" if job.array.parallel is not None else ""
            argv += ["-J", f"0-{job.array.size - 1}{limit}"]
        if job.after:
            by_kind: dict[str, list[str]] = {}
            for entry in job.after:
                by_kind.setdefault(entry.kind.value, []).append(entry.job_id)
            words = [f"{kind}:{':'.join(ids)}" for kind, ids in by_kind.items()]
            argv += ["-W", f"depend={','.join(words)}"]
        if not base.is_plain_path(_log_path(job)):
            argv += ["-o", _log_path(job)]
        return [*argv, base.as_operand(script_path)]

    def job_id(self, stdout: str) -> str:
        """Parse the id: number, dot, server (`0.ctl`); some sites print lines before it."""
        for line in reversed(stdout.splitlines()):
            if re.fullmatch(r"\d+(?:\[\])?(?:\.[A-Za-z0-9_.-]+)?", line.strip()):
                return line.strip()
        raise EngineError("qsub printed no job id", where="qsub", why=stdout.strip() or None)

    def status_argv(self, job_ids: Sequence[str]) -> list[list[str]]:
        """Return qstat with finished jobs (needs job history), then without; JSON, then text."""
        if not job_ids:
            return []
        ways = (["-x", "-f", "-F", "json"], ["-f", "-F", "json"], ["-x", "-f"], ["-f"])
        return [["qstat", *way, *job_ids] for way in ways]

    def views(self, stdout: str) -> dict[str, JobView]:
        """Parse the views from `qstat -f`, as JSON or text."""
        try:
            return {job_id: view_of(job_id, fields) for job_id, fields in read_jobs(stdout).items()}
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise EngineError(
                "the answer of qstat can't be read", where="qstat -f", why=str(error)
            ) from error

    def element_id(self, job_id: str, position: int) -> str:
        """Return e.g. `12[3].server`."""
        return job_id.replace("[]", f"[{position}]", 1)

    def array_key(self, job_id: str) -> str:
        """Return the job's number, because not all answers include the server."""
        return job_id.partition(".")[0].partition("[")[0]

    def array_limit_argv(self) -> list[str]:
        """Return the qstat command that shows the server."""
        return ["qstat", "-B", "-f"]

    def array_limit(self, stdout: str) -> int | None:
        """Parse the server's max_array_size, which it shows only if it was set."""
        found = re.search(r"^\s*max_array_size\s*=\s*(\d{1,9})\s*$", stdout, re.MULTILINE)
        return int(found[1]) if found is not None else None

    def array_status_argv(self, job_ids: Sequence[str]) -> list[list[str]]:
        """Return qstat for every element, with finished arrays, then without."""
        return [["qstat", "-t", *way[1:]] for way in self.status_argv(job_ids)]

    def array_views(self, stdout: str) -> dict[tuple[str, int], JobView]:
        """Parse the elements: `12[3].server`."""
        found: dict[tuple[str, int], JobView] = {}
        for job_id, view in self.views(stdout).items():
            match = re.match(r"(\d+)\[(\d+)\]", job_id)
            if match is not None:
                found[match[1], int(match[2])] = view
        return found

    def cancel_argv(self, job_id: str) -> list[str]:
        """Return the qdel command: TERM, then KILL after a delay of the site."""
        return ["qdel", job_id]

    def requeue_argv(self, job_id: str) -> list[str]:
        """Return the qrerun command."""
        return ["qrerun", job_id]

    def end_argv(self, job_id: str) -> list[list[str]]:
        """Return qstat as JSON, then as text for servers that lack JSON."""
        return [["qstat", "-f", "-F", "json", job_id], ["qstat", "-f", job_id]]

    def job_end(self, stdout: str, now: float) -> float | None:
        """Compute the end from walltime and start, or from the walltime used so far."""
        return _end(_fields_of_one(stdout), now)

    def node_argv(self, start: NodeStart) -> list[str]:
        """Return a command for another host; with pbsdsh unless the site needs another launcher.

        pbsdsh passes on neither the job's PATH nor its exported variables, and exits with 0
        whatever the command does: the agent has to report over its own connection.
        """
        command = base.check_command(start)
        node = base.check_node(start.node)
        launcher = start.launcher or NodeLauncher.PBSDSH
        if launcher is NodeLauncher.PBSDSH:
            return ["pbsdsh", "-n", str(start.slot), "--", *command]  # recorded: there is no -u
        if launcher is NodeLauncher.TMRSH:
            return ["pbs_tmrsh", node, *command]
        if launcher is NodeLauncher.MPIEXEC:
            return ["mpiexec", "-n", "1", "-host", node, *command]
        if launcher is NodeLauncher.SSH:
            # ssh joins words with spaces for a shell; BatchMode: it must not wait for a password.
            return ["ssh", "-o", "BatchMode=yes", node, shlex.join(command)]
        raise ValueError(f"PBS can't start agents by {launcher}")

    def allocation(
        self, environment: Mapping[str, str], read: Callable[[str], str]
    ) -> Allocation | None:
        """Return the job that the PBS_ variables and the node file describe."""
        job_id = environment.get("PBS_JOBID")
        if not job_id:
            return None
        ncpus = environment.get("NCPUS", "")
        nodes = _nodes(environment, read, int(ncpus) if ncpus.isdecimal() else None)
        index = environment.get("PBS_NODENUM", "")  # the node file may name this host differently
        is_known = index.isdecimal() and int(index) < len(nodes)
        return Allocation(
            job_id=job_id,
            nodes=nodes,
            own_node=nodes[int(index)].name if is_known else None,
            ends_at=base.ends_at(environment),
        )

    def unmapped(self, job: JobRequest) -> list[str]:
        """Return a sentence for each setting that qsub lacks."""
        found: list[str] = []
        if any(chunk.storage_bytes for chunk in job.chunks):
            fix = "a key of the site, such as `scratch`, may do it"
            found.append(f"storage: PBS has no common resource for it: not asked for; {fix}")
        if job.nodes_excluded:
            names = ", ".join(job.nodes_excluded[:3])
            found.append(f"nodesExcluded: qsub can't exclude {names}: the job may run there")
        if job.constraint:
            found.append(f"constraint: PBS has none: `{job.constraint}` is not asked for")
        if job.qos:
            found.append(f"qos: PBS has none: `{job.qos}` is not asked for")
        if job.min_nodes not in (None, job.num_nodes):
            asked = f"{job.min_nodes} to {job.num_nodes}"
            found.append(f"nodes: PBS takes one number, not {asked}: waits for all {job.num_nodes}")
        if job.warn_s is not None and job.time_limit_s is None:
            # With a time limit, the script tells the head when the end is.
            what = "PBS sends no signal before the end, and without exec_timeout the end is unknown"
            found.append(f"warn_s: {what}: TERM comes at the queue's limit, KILL seconds later")
        return found

    def explain_refusal(self, stderr: str) -> Report:
        """Return a report on a refusal of qsub."""
        return base.explain(stderr, "qsub", self.refusals)


def _log_path(job: JobRequest) -> str:
    if ":" in base.check_log_path(job.log_path):
        what = f"qsub can't write to `{job.log_path}`: it takes the part before the colon as a host"
        raise UsageError(what, where="log_path")
    # Recorded: needed also if written in place; each element has its own log.
    return job.log_path + (".^array_index^" if job.array is not None else "")


def _clock(seconds: float) -> str:
    minutes = base.minutes_up(seconds)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def _chunk(chunk: NodeChunk, num_nodes: int) -> str:
    """Format a chunk; mpiprocs=1 gives each host one line of the node file, so one pbsdsh."""
    keys = {"ncpus": str(max(1, chunk.cpus or chunk.workers)), "mpiprocs": "1"}
    if chunk.gpus:
        keys["ngpus"] = str(chunk.gpus)
    if chunk.memory_bytes:
        keys["mem"] = f"{base.mebibytes_up(chunk.memory_bytes)}mb"  # PBS's mb is 1024 * 1024 bytes
    for key, value in chunk.extra:
        keys[_check_key(key)] = _check_key(value)
    return ":".join([str(num_nodes), *(f"{key}={value}" for key, value in keys.items())])


def _check_key(text: str) -> str:
    """Return a key or value of a chunk; UsageError if it would begin another one."""
    if re.search(r"[:+=,]", base.check_value(text, "extra")):
        raise UsageError(f"`{text}` can't stand in a chunk", where="extra", fix="no `:`, `+`, `=`")
    return text


def view_of(job_id: str, fields: Mapping[str, Any]) -> JobView:
    """Interpret the fields of one job; ValueError for an invalid number."""
    word = str(fields.get("job_state", ""))
    comment = str(fields.get("comment", "")) or None
    code = fields.get("Exit_status")
    number = int(code) if code is not None else None
    substate = str(fields.get("substate", ""))
    state = _final_state(number, comment or "", substate) if word == "F" else None
    state = state or STATES.get(word, JobState.UNKNOWN)
    reason = comment
    if state is JobState.UNKNOWN:
        reason = f"PBS says {word or 'nothing'}" + (f": {comment}" if comment else "")
    elif word == "F" and number is None and comment is None:
        reason = "it never ran: it was deleted, or a job that it waits for failed"
    elif state is JobState.HELD and comment is None and (waits := _waits_for(fields)):
        reason = f"waits: {waits}"
    estimate = fields.get("estimated")
    start = estimate.get("start_time") if isinstance(estimate, dict) else None
    start = start or fields.get("estimated.start_time")
    return JobView(
        job_id=job_id,
        state=state,
        reason=reason,
        start_estimate=str(start) if start and state is JobState.PENDING else None,
        exit_code=_exit_code(number) if state.is_final else None,
        nodes=_hosts_of(str(fields.get("exec_host", ""))),
    )


def _waits_for(fields: Mapping[str, Any]) -> str:
    """Return the jobs that a job waits for, without `beforeok:...`, the jobs after it."""
    edges = str(fields.get("depend") or "").split(",")
    return ",".join(edge for edge in edges if not edge.startswith("before"))


def _fields_of_one(stdout: str) -> dict[str, str]:
    """Parse the times of one job, from JSON or text."""
    try:
        (fields,) = json.loads(stdout).get("Jobs", {}).values()
        parts = {f"{k}.walltime": fields[k].get("walltime") for k in _TIMES if k in fields}
        return {k: str(v) for k, v in {**parts, "stime": fields.get("stime")}.items() if v}
    except (ValueError, AttributeError, TypeError, RecursionError):
        pattern = r"^\s+((?:Resource_List|resources_used)\.walltime|stime) = (.*)$"
        return dict(re.findall(pattern, stdout, re.MULTILINE))


def _end(fields: Mapping[str, str], now: float) -> float | None:
    limit_s = base.clock_seconds(fields.get("Resource_List.walltime", ""))
    if limit_s is None:
        return None
    try:
        # In the server's local time, which is also the job's.
        start = time.mktime(time.strptime(fields.get("stime", "").strip()))
    except (ValueError, OverflowError):
        # The server updates the used walltime only every few minutes.
        start = now - (base.clock_seconds(fields.get("resources_used.walltime", "")) or 0.0)
    return start + limit_s if start <= now + _CLOCKS_DIFFER_S else now + limit_s


def _final_state(code: int | None, comment: str, substate: str) -> JobState:
    """Return the final state of a finished job.

    Recorded: a job that never ran because its dependency failed is F with substate 92, as after
    exit 0, but without an Exit_status. Only an Exit_status of 0 is a success. A restart of the
    server loses the comment, but keeps the substate.
    """
    if "and terminated by" in comment or substate == _DELETED:
        return JobState.CANCELLED
    if "exceeded resource walltime" in comment or code in (-28, -29):
        return JobState.TIMED_OUT
    if code is None:
        return JobState.CANCELLED
    if code == 0:
        return JobState.SUCCEEDED
    return _END_CODES.get(code, JobState.FAILED)


def _exit_code(number: int | None) -> int | None:
    """Return the head's exit code; None for PBS's own negative codes.

    Source: PBS Professional User's Guide, "Job Exit Status": 256 + n for signal n.
    """
    if number is None or number < 0:
        return None
    return number - 128 if number > 256 else number


def _hosts_of(exec_host: str) -> tuple[str, ...]:
    """Parse the hosts of `n1/0*2+n2/0*2`, each once."""
    hosts = (part.partition("/")[0] for part in exec_host.split("+") if part)
    return tuple(dict.fromkeys(hosts))


def _nodes(
    environment: Mapping[str, str], read: Callable[[str], str], num_cpus: int | None
) -> tuple[AllocatedNode, ...]:
    path = environment.get("PBS_NODEFILE", "")
    try:
        lines = [line.strip() for line in read(path).splitlines() if line.strip()]
    except OSError as error:
        raise EngineError(
            "the list of this job's nodes can't be read",
            where=path or "PBS_NODEFILE is not set",
            why=f"{error.strerror or error}: it exists on the job's first host only",
        ) from error
    # NCPUS is for this host's chunk, so it is valid for all nodes only if there is one host.
    hosts = list(dict.fromkeys(lines))
    known = num_cpus if len(hosts) == 1 else None
    return tuple(AllocatedNode(name=host, cpus=known, slot=lines.index(host)) for host in hosts)


DIALECT: base.Dialect = PbsDialect()
