"""Slurm: sbatch, squeue, sacct, scontrol, scancel and srun."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from torchmuster.core.model.links import ResubmitMethod
from torchmuster.core.model.verdict import Report
from torchmuster.errors import UsageError
from torchmuster.launcher.engines import base
from torchmuster.launcher.engines.base import (
    AccountQuestion,
    EngineError,
    NodeQuestion,
    NodeStart,
    PreemptionQuestion,
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
from torchmuster.launcher.model.scheduler import expand_counts, expand_hostlist

# States, reasons for waiting, shortages of a partition, and refusals of sbatch.
#
# Source: https://slurm.schedmd.com/job_reason_codes.html, and the section JOB REASON CODES of `man
# squeue`.


# Source: https://slurm.schedmd.com/job_state_codes.html, states and flags.
STATES = {
    word: state
    for state, words in {
        # CONFIGURING: nodes boot; the script has not begun.
        JobState.PENDING: "PENDING CONFIGURING EXPEDITING",
        JobState.RUNNING: "RUNNING RESIZING SIGNALING",
        JobState.SUSPENDED: "SUSPENDED STOPPED",
        JobState.HELD: "REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT",
        JobState.ENDING: "COMPLETING STAGE_OUT",
        JobState.SUCCEEDED: "COMPLETED",
        JobState.FAILED: "FAILED",
        JobState.CANCELLED: "CANCELLED",
        JobState.TIMED_OUT: "TIMEOUT DEADLINE",
        JobState.OUT_OF_MEMORY: "OUT_OF_MEMORY",
        JobState.NODE_FAILED: "NODE_FAIL BOOT_FAIL LAUNCH_FAILED",
        JobState.PREEMPTED: "PREEMPTED",
        JobState.REQUEUED: "REQUEUED REQUEUE_FED",
    }.items()
    for word in words.split()
}


def capacity_argv(job_id: str) -> list[list[str]]:
    """Return the commands that show what a job asks for, and what its partition has and allows."""
    return [
        ["scontrol", "--oneliner", "show", "job", job_id],
        ["sinfo", "--noheader", "--exact", "--format=%P|%D|%c"],
        ["scontrol", "--oneliner", "show", "partition"],
    ]


def shortage(answers: Sequence[str]) -> str | None:
    """Return what the partition has or allows if a job asks for more; else None."""
    if len(answers) != 3:
        return None
    asked = dict(re.findall(r"(?:^| )(Partition|NumNodes|MinCPUsNode|TimeLimit)=(\S+)", answers[0]))
    return _too_few_nodes(asked, answers[1]) or _too_low_limit(asked, answers[2])


def _too_low_limit(asked: Mapping[str, str], partitions: str) -> str | None:
    """Compare time and nodes with the partition's limits.

    Source: https://slurm.schedmd.com/scontrol.html, "show partition": MaxTime, MaxNodes.
    """
    name = asked.get("Partition", "")
    lines = (line for line in partitions.splitlines() if f"PartitionName={name} " in line)
    allowed = dict(re.findall(r"(?:^| )(MaxTime|MaxNodes)=(\S+)", next(lines, "")))
    most_s, wanted_s = (
        base.clock_seconds(text or "") for text in (allowed.get("MaxTime"), asked.get("TimeLimit"))
    )
    if most_s is not None and wanted_s is not None and wanted_s > most_s:
        return (
            f"partition {name} allows {allowed['MaxTime']}; the job asks for {asked['TimeLimit']}"
        )
    most, wanted = allowed.get("MaxNodes", ""), asked.get("NumNodes", "0").partition("-")[0]
    if most.isdecimal() and wanted.isdecimal() and int(wanted) > int(most):
        return f"partition {name} allows a job {most} {_nodes(int(most))}; it asks for {wanted}"
    return None


def _too_few_nodes(asked: Mapping[str, str], sinfo: str) -> str | None:
    sizes = _sizes(sinfo, asked.get("Partition", ""))
    num_asked = int(asked.get("NumNodes", "0").partition("-")[0] or 0)
    cpus_asked = int(
        asked.get("MinCPUsNode", "0") if asked.get("MinCPUsNode", "0").isdecimal() else 0
    )
    num_fit = sum(number for number, cpus in sizes if cpus >= cpus_asked)
    if not sizes or num_asked <= num_fit:
        return None
    has = " and ".join(f"{number} {_nodes(number)} of {cpus} CPUs" for number, cpus in sizes)
    of_cpus = f" of at least {cpus_asked} CPUs" if cpus_asked > min(c for _, c in sizes) else ""
    return f"partition {asked['Partition']} has {has}; the job asks for {num_asked} {_nodes(num_asked)}{of_cpus}"


def _nodes(number: int) -> str:
    return "node" if number == 1 else "nodes"


def _sizes(text: str, partition: str) -> list[tuple[int, int]]:
    """Return (number of nodes, CPUs of each), the largest first."""
    found: dict[int, int] = {}
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) == 3 and cells[0].rstrip("*") == partition and cells[1].isdecimal():
            cpus = int(cells[2]) if cells[2].isdecimal() else 0
            found[cpus] = found.get(cpus, 0) + int(cells[1])
    return [(found[cpus], cpus) for cpus in sorted(found, reverse=True)]


REASONS, REFUSALS = read_scheduler_texts(
    os.path.join(os.path.dirname(__file__), "slurm.txt"),
    "(?:{})(?![A-Za-z])",
    capacity_argv,
    shortage,
)


# Whether a node is lost to its job.
# Source: https://slurm.schedmd.com/sinfo.html, "NODE STATE CODES": down, and powering off.
_LOST = frozenset({"DOWN", "POWERED_DOWN", "POWERING_DOWN", "FAIL"})


def node_is_lost(stdout: str, node: str) -> str | None:
    """Return the words of an answer that show that the node is lost to its job; None if none do."""
    named = re.search(r"(?:^|\s)NodeName=(\S+)", stdout)
    if named is not None:
        state = re.search(r"\sState=([A-Z_+*~#!%$@^-]+)", stdout)
        words = re.split(r"[^A-Z_]+", state[1]) if state is not None else []
        lost = sorted(_LOST.intersection(words)) if named[1] == node else []
        return f"its state is {lost[0]}" if lost else None
    if not re.search(r"(?:^|\s)JobState=RUNNING(?:\s|$)", stdout):
        return None
    listed = re.search(r"\sNodeList=(\S+)", stdout)
    try:
        names = expand_hostlist(listed[1]) if listed is not None else ()
    except ValueError:
        return None
    return "it is no longer a node of the job" if names and node not in names else None


# The commands show the node, and the job, from which Slurm takes lost nodes.
_SHOW = ("scontrol", "--oneliner", "show")
LOST_NODE = NodeQuestion(
    argv_for=lambda job_id, node: [[*_SHOW, "node", node], [*_SHOW, "job", job_id]],
    is_lost=node_is_lost,
)


def _grace_s(stdout: str) -> float | None:
    """Return the grace of a preempted job: from PreemptTime to EndTime, as recorded from 22.05.

    EndTime of a job without a time limit is `Unknown` while it is in the future
    (`slurm_sprint_job_info`).
    """
    found = dict(re.findall(r"(?:^|\s)(JobState|PreemptTime|EndTime)=(\S+)", stdout))
    if found.get("JobState") != "RUNNING":
        return None
    try:
        begin = datetime.fromisoformat(found["PreemptTime"])
        if found["EndTime"] == "Unknown":
            return math.inf
        return max(0.0, (datetime.fromisoformat(found["EndTime"]) - begin).total_seconds())
    except (KeyError, ValueError):  # e.g. `None`
        return None


def _is_the_end(job: str, partitions: str) -> bool:
    """Return whether Slurm only cancels this job when it preempts it.

    Source: slurm.conf.html, PreemptMode; `sbatch --no-requeue`.
    """
    found = dict(re.findall(r"(?:^|\s)(Requeue|Partition)=(\S+)", job))
    lines = partitions.splitlines()
    own = next((one for one in lines if f"PartitionName={found.get('Partition')} " in one), "")
    return found.get("Requeue") == "0" or " PreemptMode=CANCEL " in f"{own} "


PREEMPTION = PreemptionQuestion(
    argv_for=lambda job_id: ["scontrol", "--oneliner", "show", "job", job_id],
    grace_s=_grace_s,
    argv_of_rules=("scontrol", "--oneliner", "show", "partition"),
    is_the_end=_is_the_end,
)


# Source: https://slurm.schedmd.com/job_reason_codes.html
_HOLDS = frozenset({"JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue"})
_NO_WORDS = frozenset({"", "None", "(null)", "N/A", "Unknown", "None assigned", "NONE"})


def parse_accounts(text: str) -> tuple[str, ...]:
    """Parse the accounts from `sacctmgr -nP show associations format=account`, each once."""
    words = (line.strip() for line in text.splitlines())
    return tuple(dict.fromkeys(w for w in words if re.fullmatch(r"[A-Za-z0-9_][\w.@-]*", w)))


def parse_sinfo(text: str) -> tuple[Queue, ...]:
    """Parse the partitions, each once; nodes of several kinds give several lines for one."""
    found: dict[str, Queue] = {}
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) != 7 or not cells[0].strip("*"):
            continue
        name, state, limit, nodes, cpus, memory, gres = (cell.strip() for cell in cells)
        about = f"{nodes} nodes of {cpus} CPUs and {memory} MB, at most {limit}"
        about += "" if gres in ("(null)", "") else f", {gres}"
        known = found.get(name.rstrip("*"))
        found[name.rstrip("*")] = Queue(
            name=name.rstrip("*"),
            is_default=name.endswith("*"),
            is_open=state == "up",
            about=f"{known.about}; {about}" if known is not None else about,
        )
    return tuple(found.values())


_QUEUES = QueueQuestion(argv=("sinfo", "-h", "-o", "%P|%a|%l|%D|%c|%m|%G"), parse=parse_sinfo)
_ACCOUNTS = AccountQuestion(
    argv_for=lambda user: [
        "sacctmgr",
        "-nP",
        "show",
        "associations",
        f"user={user}",
        "format=account",
    ],
    parse=parse_accounts,
)


class SlurmDialect:
    """Slurm 20.11 and later."""

    name = "slurm"
    wait_reasons = REASONS
    queues = _QUEUES
    accounts = _ACCOUNTS
    lost_node = LOST_NODE
    preemption = PREEMPTION
    refusals = REFUSALS
    resubmit_methods: tuple[ResubmitMethod, ...] = (ResubmitMethod.REQUEUE, ResubmitMethod.SUBMIT)
    array_variable = "SLURM_ARRAY_TASK_ID"

    def script(self, job: JobRequest) -> str:
        """Return the complete job script; unequal nodes make a heterogeneous job."""
        lines = ["#!/bin/bash -l"]
        for position, chunk in enumerate(job.chunks):
            options = _options_once(job) if position == 0 else []
            if position:
                lines.append("#SBATCH hetjob")
            lines += base.assemble("SBATCH", options + _options_each(job, chunk), job.directives)
        return "\n".join([*lines, *base.body(job), ""])

    def submit_argv(self, job: JobRequest, script_path: str) -> list[str]:
        """Return the sbatch command."""
        argv = ["sbatch", "--parsable"]
        if job.array is not None:
            limit = f"%{job.array.parallel}" if job.array.parallel is not None else ""
            argv.append(f"--array=0-{job.array.size - 1}{limit}")
        if job.after:
            words = [f"{entry.kind.value}:{entry.job_id}" for entry in job.after]
            argv += [f"--dependency={','.join(words)}", "--kill-on-invalid-dep=yes"]
        if not base.is_plain_path(job.log_path):
            argv.append(f"--output={_log_pattern(job)}")
        return [*argv, base.as_operand(script_path)]

    def job_id(self, stdout: str) -> str:
        """Parse the id from `123`, `123;cluster`, or the output of a site's wrapper."""
        for line in reversed(stdout.splitlines()):
            match = re.fullmatch(r"(?:Submitted batch job )?(\d+)(?:;\S*)?", line.strip())
            if match:
                return match.group(1)
        raise EngineError("sbatch printed no job id", where="sbatch", why=stdout.strip() or None)

    def status_argv(self, job_ids: Sequence[str]) -> list[list[str]]:
        """Return squeue (recent jobs), sacct (needs accounting), scontrol (no accounting)."""
        if not job_ids:
            return []
        ids = ",".join(job_ids)
        fields = "--format=JobIDRaw,JobID,State,ExitCode,Reason,Start,NodeList"
        sacct = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={ids}", fields]
        squeue = ["squeue", "--noheader", "--states=all", f"--jobs={ids}"]
        scontrol = ["scontrol", "--oneliner", "show", "job"]
        return [
            [*squeue, "--format=squeue|%i|%T|%r|%S|%N"],
            sacct,
            # scontrol 22.05 accepts only one id; for several, show all jobs.
            [*scontrol, *job_ids] if len(job_ids) == 1 else scontrol,
        ]

    def views(self, stdout: str) -> dict[str, JobView]:
        """Parse views from squeue, sacct or scontrol; join components of heterogeneous jobs."""
        found: dict[str, JobView] = {}
        for line in stdout.splitlines():
            view = _view(line.strip())
            if view is not None:
                known = found.get(view.job_id)
                found[view.job_id] = view if known is None else _joined(known, view)
        return found

    def element_id(self, job_id: str, position: int) -> str:
        """Return e.g. `12_3`."""
        return f"{job_id}_{position}"

    def array_key(self, job_id: str) -> str:
        """Return the job's number."""
        return job_id

    def array_limit_argv(self) -> list[str]:
        """Return the scontrol command that shows the configuration."""
        return ["scontrol", "show", "config"]

    def array_limit(self, stdout: str) -> int | None:
        """Parse MaxArraySize, which also limits the element numbers: the highest is one less."""
        found = re.search(r"^MaxArraySize\s*=\s*(\d{1,9})\s*$", stdout, re.MULTILINE)
        return int(found[1]) if found is not None else None

    def array_status_argv(self, job_ids: Sequence[str]) -> list[list[str]]:
        """Return squeue and sacct with a line for each element, or for several waiting ones."""
        ids = ",".join(job_ids)
        sacct, squeue = self.status_argv(job_ids)[1], ["squeue", "--noheader", "--states=all"]
        return [[*squeue, f"--jobs={ids}", "--array", "--format=squeue|%i|%T|%r|%S|%N"], sacct]

    def array_views(self, stdout: str) -> dict[tuple[str, int], JobView]:
        """Parse the elements of `12_3` and `12_[4-9,11%2]`."""
        found: dict[tuple[str, int], JobView] = {}
        for line in stdout.splitlines():
            match = _ELEMENTS.search(line)
            view = _view(line.strip()) if match is not None else None
            if match is not None and view is not None:
                for name in _expand(f"[{match[2] or match[3]}]"):
                    found.setdefault((match[1], int(name)), view)
        return found

    def cancel_argv(self, job_id: str) -> list[str]:
        """Return the scancel command: TERM to all steps and the script, KILL after KillWait."""
        return ["scancel", "--full", job_id]

    def requeue_argv(self, job_id: str) -> list[str]:
        """Return the scontrol command; users may requeue jobs submitted with --requeue."""
        return ["scontrol", "requeue", job_id]

    def end_argv(self, job_id: str) -> list[list[str]]:
        """Return squeue with the time left, then scontrol."""
        return [
            ["squeue", "--noheader", f"--jobs={job_id}", "--format=left|%L"],
            ["scontrol", "--oneliner", "show", "job", job_id],
        ]

    def job_end(self, stdout: str, now: float) -> float | None:
        """Compute the end from the time left, because durations have no time zone."""
        ends: list[float] = []
        for line in stdout.splitlines():
            name, _, text = line.strip().partition("|")
            left_s = base.clock_seconds(text) if name == "left" else _left_of_scontrol(line)
            if left_s is not None:
                ends.append(now + left_s)
        return min(ends, default=None)

    def node_argv(self, start: NodeStart) -> list[str]:
        """Return an srun command that starts one process, whatever else runs on the node."""
        command = base.check_command(start)
        if start.launcher not in (None, NodeLauncher.SRUN):
            raise ValueError(f"Slurm can't start agents by {start.launcher}")
        argv = ["srun", *_STEP_OPTIONS, f"--nodelist={base.check_node(start.node)}"]
        if start.cpus is not None:
            # Since 22.05, srun doesn't inherit it from sbatch.
            argv.append(f"--cpus-per-task={start.cpus}")
        if start.het_group is not None:
            argv.append(f"--het-group={start.het_group}")
        return [*argv, "--", *command]

    def allocation(
        self, environment: Mapping[str, str], read: Callable[[str], str]
    ) -> Allocation | None:
        """Return the job that the SLURM_ variables describe; reads no file."""
        # 22.05 sets the second, later versions the first; SLURM_JOB_ID is the component's own id.
        names = ("SLURM_HET_JOB_ID", "SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID")
        job_id = next((environment[name] for name in names if environment.get(name)), None)
        if job_id is None:
            return None
        return Allocation(
            job_id=job_id,
            nodes=_slurm_nodes(environment),
            ends_at=base.ends_at(environment, "SLURM_JOB_END_TIME"),
            own_node=environment.get("SLURMD_NODENAME"),
        )

    def unmapped(self, job: JobRequest) -> list[str]:
        """Return a sentence for each setting that sbatch lacks."""
        if len(job.chunks) > 1 and job.min_nodes not in (None, job.num_nodes):
            asked = f"{job.min_nodes} to {job.num_nodes} nodes"
            return [f"nodes: {asked} of unequal kinds: Slurm waits for all {job.num_nodes}"]
        return []

    def explain_refusal(self, stderr: str) -> Report:
        """Return a report on a refusal of sbatch."""
        return base.explain(stderr, "sbatch", REFUSALS)


# Source: https://slurm.schedmd.com/job_array.html, "Job Commands".
_ELEMENTS = re.compile(r"\|(\d+)_(?:(\d+)|\[([\d,-]+)(?:%\d+)?\])\|")


# One process on one node, next to the steps that run there, with all CPUs and memory of the job and
# no CPU mask (we set one per worker); its end must not end anything else.
# Source: https://slurm.schedmd.com/srun.html
_STEP_OPTIONS = (
    "--nodes=1",
    "--ntasks=1",
    "--overlap",
    "--mem=0",
    "--cpu-bind=none",
    "--mpi=none",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--no-kill",
    "--input=none",
    "--unbuffered",
    "--export=ALL",
)


def _options_once(job: JobRequest) -> list[str]:
    """Return the options of the whole job; of a heterogeneous one only the first component has them.

    Source: https://slurm.schedmd.com/sbatch.html
    """
    options = [f"--job-name={base.clean_name(job.name, 63)}"]
    pattern = _log_pattern(job)
    if base.is_plain_path(job.log_path):
        options.append(f"--output={pattern}")
    # A lost node must not end the job (the run replaces it or shrinks), and a restart must not
    # truncate the log.
    options += ["--open-mode=append", "--no-kill"]
    options.append("--requeue" if job.requeue else "--no-requeue")
    if job.warn_s is not None:
        # At most 65535 s. B: only to the script, which is the head (exec).
        options.append(f"--signal=B:USR1@{min(65535, max(1, round(job.warn_s)))}")
    return options


def _options_each(job: JobRequest, chunk: NodeChunk) -> list[str]:
    """Return the options of each component; before Slurm 20.11, --mem was not carried over.

    Source: https://slurm.schedmd.com/heterogeneous_jobs.html, "Submitting Jobs".
    """
    options = [f"--nodes={chunk.num_nodes}", "--ntasks-per-node=1"]
    if len(job.chunks) == 1 and job.min_nodes not in (None, job.num_nodes):
        # Without --ntasks-per-node: 22.05 counts tasks from the minimum of nodes, and then gives no
        # more (observed).
        options = [f"--nodes={job.min_nodes}-{job.num_nodes}"]
    if chunk.cpus:
        options.append(f"--cpus-per-task={chunk.cpus}")
    elif chunk.workers > 1 and not chunk.gpus:  # with GPUs, a site's DefCpuPerGPU is better
        options.append(f"--cpus-per-task={chunk.workers}")
    if chunk.gpus:
        options.append(f"--gpus-per-node={chunk.gpus}")
    if chunk.memory_bytes:
        options.append(f"--mem={base.mebibytes_up(chunk.memory_bytes)}M")
    if chunk.storage_bytes:
        options.append(f"--tmp={base.mebibytes_up(chunk.storage_bytes)}M")
    for key, value in chunk.extra:
        options.append(f"--{base.check_value(key, 'extra')}={base.check_value(value, key)}")
    minutes = "" if job.time_limit_s is None else str(base.minutes_up(job.time_limit_s))
    each = (
        ("partition", "queue", job.queue),
        ("account", "account", job.account),
        ("qos", "qos", job.qos),
        ("constraint", "constraint", job.constraint),
        ("exclude", "nodes_excluded", ",".join(job.nodes_excluded)),
        ("time", "time_limit_s", minutes),  # a bare number is minutes
    )
    options += [f"--{word}={base.check_value(text, name)}" for word, name, text in each if text]
    # A key of the site replaces ours: `gpus-per-node=a100:4`.
    return list({option.partition("=")[0]: option for option in options}.values())


def _log_pattern(job: JobRequest) -> str:
    """Return the log path as a pattern of Slurm: `%` begins a placeholder, a backslash is lost."""
    path = base.check_log_path(job.log_path)
    if "\\" in path:
        raise UsageError(f"Slurm can't write to `{path}`: it takes the backslash away")
    return path.replace("%", "%%") + (".%a" if job.array is not None else "")


def _view(line: str) -> JobView | None:
    if line.startswith("JobId="):
        return _view_of_scontrol(line)
    cells = line.split("|")
    if cells[0] == "squeue" and len(cells) == 6:
        return _make_view(cells[1], cells[2], cells[3], start=cells[4], nodes=cells[5])
    if len(cells) == 7 and cells[0].isdecimal():
        # JobID has the `12+1` of a component, JobIDRaw a separate number for each.
        return _make_view(cells[1], cells[2], cells[4], cells[3], start=cells[5], nodes=cells[6])
    return None


def _view_of_scontrol(line: str) -> JobView:
    # Values may contain spaces (Comment, Command); those read here don't, and come first.
    fields: dict[str, str] = {}
    for key, value in re.findall(r"(?:^| )([A-Za-z:/]+)=(\S*)", line):
        fields.setdefault(key, value)
    job_id = fields.get("HetJobId") or fields["JobId"]
    start, nodes = fields.get("StartTime", ""), fields.get("NodeList", "")
    return _make_view(
        job_id,
        fields.get("JobState", ""),
        fields.get("Reason", ""),
        fields.get("ExitCode", ""),
        start=start,
        nodes=nodes,
    )


def _left_of_scontrol(line: str) -> float | None:
    # `UNLIMITED` and `Partition_Limit` are not times.
    found = dict(re.findall(r"(?:^| )(RunTime|TimeLimit)=(\S+)", line))
    limit_s = base.clock_seconds(found.get("TimeLimit", ""))
    elapsed_s = base.clock_seconds(found.get("RunTime", ""))
    return None if limit_s is None or elapsed_s is None else limit_s - elapsed_s


def _make_view(
    job_id: str, word: str, reason: str, code: str = "", *, start: str, nodes: str
) -> JobView:
    state = STATES.get(word.partition(" ")[0], JobState.UNKNOWN)  # `CANCELLED by 1000`
    if state is JobState.PENDING and reason in _HOLDS:
        state = JobState.HELD
    # Slurm still reports why a running job had to wait.
    is_past = reason in _NO_WORDS or state is JobState.RUNNING
    why = None if is_past else reason
    if state is JobState.UNKNOWN:
        why = f"Slurm says {word or 'nothing'}"
    names = () if nodes in _NO_WORDS else _expand(nodes)
    return JobView(
        job_id=re.split(r"[+_.]", job_id)[0],
        state=state,
        reason=why,
        start_estimate=start if state is JobState.PENDING and start not in _NO_WORDS else None,
        exit_code=_exit_code(code, state) if state.is_final else None,
        nodes=names,
    )


def _expand(text: str) -> tuple[str, ...]:
    try:
        return expand_hostlist(text)
    except ValueError as error:
        raise EngineError("Slurm's list can't be read", why=str(error)) from error


def _exit_code(text: str, state: JobState) -> int | None:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or (text == "0:0" and state is not JobState.SUCCEEDED):
        return None  # observed: a job that never ran has 0:0
    status, signum = map(int, match.groups())
    return 128 + signum if signum else status


def _joined(first: JobView, other: JobView) -> JobView:
    """Join a heterogeneous job: its script runs in the first component; nodes are of all."""
    return replace(first, nodes=tuple(dict.fromkeys((*first.nodes, *other.nodes))))


def _slurm_nodes(environment: Mapping[str, str]) -> tuple[AllocatedNode, ...]:
    # Source: sbatch.html, "OUTPUT ENVIRONMENT VARIABLES".
    size = environment.get("SLURM_HET_SIZE", "")
    if not size.isdecimal():
        return _component(environment, "", None, 0)
    nodes: list[AllocatedNode] = []
    for index in range(min(int(size), 128)):  # Slurm's limit of components
        nodes += _component(environment, f"_HET_GROUP_{index}", index, len(nodes))
    return tuple(nodes)


def _component(
    environment: Mapping[str, str], suffix: str, het_group: int | None, first: int
) -> tuple[AllocatedNode, ...]:
    listed = environment.get(f"SLURM_JOB_NODELIST{suffix}", "")
    try:
        names = expand_hostlist(listed)
        cpus = expand_counts(environment.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}", "") or "0")
    except ValueError as error:
        where = f"SLURM_JOB_NODELIST{suffix}={listed}"
        what = "Slurm's list of nodes can't be read"
        raise EngineError(what, where=where, why=str(error)) from error
    # `2`, or with a type `a100:2`; also `a100:1,h100:1`.
    gpus = re.findall(
        r"(?:^|[:,])(\d+)(?=,|$)", environment.get(f"SLURM_GPUS_PER_NODE{suffix}", "")
    )
    return tuple(
        AllocatedNode(
            name=name,
            cpus=cpus[min(index, len(cpus) - 1)] or None,
            gpus=sum(map(int, gpus)) if gpus else None,
            slot=first + index,
            het_group=het_group,
        )
        for index, name in enumerate(names)
    )


DIALECT: base.Dialect = SlurmDialect()
