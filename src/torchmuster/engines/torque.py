"""Torque: PBS with `-l nodes=2:ppn=4:gpus=4`, XML and `pbsdsh -u`. Not seen running; from its manual."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchmuster.engines import base
from torchmuster.engines.base import NodeStart
from torchmuster.engines.pbs import PbsDialect, check_key, exit_code, hosts_of
from torchmuster.model.job import JobRequest, JobView, NodeChunk, NodeLauncher
from torchmuster.model.states import JobState

# Source: Torque Administrator Guide, "qstat", job states.
STATES = {
    "Q": JobState.PENDING,
    "T": JobState.PENDING,
    "W": JobState.PENDING,
    "H": JobState.HELD,
    "S": JobState.HELD,
    "R": JobState.RUNNING,
    "E": JobState.ENDING,
}
# Source: Torque Administrator Guide, "Job Exit Status".
_END_CODES = {
    -12: JobState.TIMED_OUT,  # CPU time
    -11: JobState.TIMED_OUT,
    -10: JobState.OUT_OF_MEMORY,
}


class TorqueDialect(PbsDialect):
    """Torque 4 to 6, with pbs_sched, Maui or Moab."""

    name = "torque"
    name_limit = 15  # Source: Torque Administrator Guide, "qsub", -N
    array_variable = ""  # its `qsub -t` has not been tried
    output_lines = ()  # its -k keeps the output in the home folder

    def resource_lines(self, job: JobRequest) -> list[str]:
        """Return the lines that ask for nodes; `mem` is that of the whole job."""
        chunks = list(job.chunks)
        counts = [chunk.num_nodes for chunk in chunks]
        if len(chunks) == 1:
            counts = [job.num_nodes]
        words = [_chunk(chunk, count) for chunk, count in zip(chunks, counts, strict=True)]
        lines = [f"-l nodes={'+'.join(words)}"]
        total = sum((c.memory_bytes or 0) * n for c, n in zip(chunks, counts, strict=True))
        if total:
            lines.append(f"-l mem={base.mebibytes_up(total)}mb")
        return lines

    def status_argv(self, job_ids: Sequence[str]) -> list[list[str]]:
        """Return qstat as XML, and as text; finished jobs are in both for as long as the queue keeps them."""
        return [["qstat", "-f", "-x", *job_ids], ["qstat", "-f", *job_ids]] if job_ids else []

    def end_argv(self, job_id: str) -> list[list[str]]:
        """Return qstat as text."""
        return [["qstat", "-f", job_id]]

    def view(self, job_id: str, fields: Mapping[str, Any]) -> JobView:
        """Return what the fields of one job mean; Torque's are those of older PBS."""
        return _view(job_id, fields)

    def node_argv(self, start: NodeStart) -> list[str]:
        """Return a command for another host; pbsdsh takes its name."""
        if start.launcher in (None, NodeLauncher.PBSDSH):
            command = base.check_command(start)
            return ["pbsdsh", "-h", base.check_node(start.node), *command]
        return super().node_argv(start)

    def unmapped(self, job: JobRequest) -> list[str]:
        """Return what Torque's qsub can't be told."""
        found = super().unmapped(job)
        if any(chunk.memory_bytes for chunk in job.chunks) and job.num_nodes > 1:
            found.append("memory: Torque counts it for the whole job: the sum is asked for")
        if job.num_nodes > 1:
            policy = "JOBNODEMATCHPOLICY EXACTNODE"
            found.append(f"nodes: where the site has not set {policy}, two may share a host")
        return found


def _chunk(chunk: NodeChunk, num_nodes: int) -> str:
    words = [str(num_nodes), f"ppn={max(1, chunk.cpus or chunk.workers)}"]
    if chunk.gpus:
        words.append(f"gpus={chunk.gpus}")
    # A property of nodes has no value: (`bigmem`, "").
    for key, value in chunk.extra:
        words.append(f"{check_key(key)}={check_key(value)}" if value else check_key(key))
    return ":".join(words)


def _view(job_id: str, fields: Mapping[str, Any]) -> JobView:
    word = str(fields.get("job_state", ""))
    comment = str(fields.get("comment", "")) or None
    text = str(fields.get("exit_status", ""))
    number = int(text) if re.fullmatch(r"-?\d{1,9}", text) else None
    state = _final_state(number) if word == "C" else STATES.get(word, JobState.UNKNOWN)
    return JobView(
        job_id=job_id,
        state=state,
        reason=f"Torque says {word or 'nothing'}" if state is JobState.UNKNOWN else comment,
        exit_code=exit_code(number) if state.is_final else None,
        nodes=hosts_of(str(fields.get("exec_host", ""))),
    )


def _final_state(code: int | None) -> JobState:
    """Return how a completed job went; without an exit status it never ran."""
    if code is None or code == 271:  # 256 + SIGTERM: what qdel leaves
        return JobState.CANCELLED
    if code == 0:
        return JobState.SUCCEEDED
    return _END_CODES.get(code, JobState.FAILED)


DIALECT: base.Dialect = TorqueDialect()
