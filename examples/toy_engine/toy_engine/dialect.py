"""The dialect of the toy scheduler: pure functions from values to text, and from text to values."""

import re
from collections.abc import Callable, Mapping, Sequence

from torchmuster.core.model.links import ResubmitMethod
from torchmuster.core.model.verdict import Report
from torchmuster.launcher.engines import base
from torchmuster.launcher.engines.base import EngineError, NodeStart, Refusal
from torchmuster.launcher.model.job import AllocatedNode, Allocation, JobRequest, JobState, JobView

# Every word that `toy_stat` can print. Any other is UNKNOWN, never a success.
STATES = {
    "waits": JobState.PENDING,
    "held": JobState.HELD,
    "runs": JobState.RUNNING,
    "done": JobState.SUCCEEDED,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
    "late": JobState.TIMED_OUT,
}
REFUSALS = (
    Refusal(
        pattern="no such queue",
        error="the toy scheduler knows no such queue",
        hint='it has one, `day`: queue = "day"',
    ),
)


class ToyDialect:
    """What torchmuster has to know of the toy scheduler."""

    name = "toy"
    resubmit_methods: tuple[ResubmitMethod, ...] = (ResubmitMethod.SUBMIT,)
    tools = ("toy_submit", "toy_stat", "toy_cancel")  # for `muster engines check`
    variables = ("TOY_JOB_ID", "TOY_NODE")  # what a job has from it, by how the names begin
    own_keys = ("priority",)  # of a section in muster.toml, for this scheduler alone

    def script(self, job: JobRequest) -> str:
        """Return the job script: directives, then what all schedulers' scripts share."""
        options = [f"--name={base.clean_name(job.name, 40)}", f"--nodes={job.num_nodes}"]
        cpus = max((chunk.cpus or 0 for chunk in job.chunks), default=0)
        if cpus:
            options.append(f"--cpus={cpus}")
        if base.is_plain_path(base.check_log_path(job.log_path)):
            options.append(f"--log={job.log_path}")
        if job.time_limit_s is not None:
            options.append(f"--time={base.minutes_up(job.time_limit_s)}")  # minutes
        of_site = (("queue", job.queue), ("account", job.account), *job.own_keys)
        for option, value in of_site:
            if value:
                options.append(f"--{option}={base.check_value(value, option)}")
        lines = ["#!/bin/bash", *base.assemble("TOY", options, job.directives)]
        return "\n".join([*lines, *base.body(job), ""])

    def submit_argv(self, job: JobRequest, script_path: str) -> list[str]:
        """Return the command; a log path that a directive can't hold goes here."""
        argv = ["toy_submit"]
        if job.after:
            argv.append("--after=" + ",".join(f"{a.kind.value}:{a.job_id}" for a in job.after))
        if not base.is_plain_path(job.log_path):
            argv.append(f"--log={job.log_path}")
        return [*argv, base.as_operand(script_path)]

    def job_id(self, stdout: str) -> str:
        """Return the id from `toy job 12`; a site's greeting before it does no harm."""
        for line in reversed(stdout.splitlines()):
            match = re.fullmatch(r"toy job (\d+)", line.strip())
            if match:
                return match.group(1)
        raise EngineError("toy_submit printed no job id", where="toy_submit", why=stdout or None)

    def status_argv(self, job_ids: Sequence[str]) -> list[list[str]]:
        """Return one command that asks about all jobs."""
        return [["toy_stat", *job_ids]] if job_ids else []

    def views(self, stdout: str) -> dict[str, JobView]:
        """Return a view for each line `12|runs|0|toy1,toy2|a reason`."""
        found = {}
        for line in stdout.splitlines():
            cells = line.split("|", 4)
            if len(cells) != 5 or not cells[0].isdecimal():
                continue
            job_id, word, code, nodes, reason = cells
            state = STATES.get(word, JobState.UNKNOWN)
            is_known = state is not JobState.UNKNOWN
            found[job_id] = JobView(
                job_id=job_id,
                state=state,
                reason=(reason or None) if is_known else f"toy_stat says {word or 'nothing'}",
                exit_code=int(code) if state.is_final and code.isdecimal() else None,
                nodes=tuple(node for node in nodes.split(",") if node),
            )
        return found

    def cancel_argv(self, job_id: str) -> list[str]:
        """Return the command that ends a job."""
        return ["toy_cancel", job_id]

    def requeue_argv(self, job_id: str) -> list[str]:
        """There is no such command here; `resubmit_methods` says so, so it is never called."""
        raise EngineError("the toy scheduler starts no job again", where=f"job {job_id}")

    def end_argv(self, job_id: str) -> list[list[str]]:
        """Return nothing: the job's environment tells its end."""
        return []

    def job_end(self, stdout: str, now: float) -> float | None:
        """Return None, for nothing was asked."""
        return None

    def node_argv(self, start: NodeStart) -> list[str]:
        """Return the command by which the head starts an agent on another node."""
        return ["toy_run", base.check_node(start.node), *base.check_command(start)]

    def allocation(
        self, environment: Mapping[str, str], read: Callable[[str], str]
    ) -> Allocation | None:
        """Return the job that this process runs in, from the variables that the scheduler sets."""
        job_id = environment.get("TOY_JOB_ID")
        if not job_id:
            return None
        names = environment.get("TOY_NODES", "").split(",")
        return Allocation(
            job_id=job_id,
            nodes=tuple(AllocatedNode(name=n, slot=i) for i, n in enumerate(names) if n),
            ends_at=base.ends_at(environment),
            own_node=environment.get("TOY_NODE"),
        )

    def unmapped(self, job: JobRequest) -> list[str]:
        """Return what is not asked for, and what happens instead."""
        found = []
        if any(chunk.gpus for chunk in job.chunks):
            found.append("gpus: the toy scheduler counts none; jobs see all of the machine's")
        if any(chunk.memory_bytes for chunk in job.chunks):
            found.append("memory: the toy scheduler doesn't limit it")
        return found

    def explain_refusal(self, stderr: str) -> Report:
        """Return a report on what toy_submit refused; the scheduler's own words stay in it."""
        return base.explain(stderr, "toy_submit", REFUSALS)


DIALECT: base.Dialect = ToyDialect()

# What the contract tests of torchmuster have to know (docs/writing-an-engine.md).
CONTRACT = {"directive": "#TOY", "unknown": "1|splendid|0|toy1|\n"}
