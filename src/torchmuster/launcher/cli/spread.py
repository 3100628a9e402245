"""Find the hosts for a `muster torchrun` command, and whether its head starts the others."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchmuster.core.cli.find import Where, find_place
from torchmuster.core.model.text import few_of
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import MusterError, UsageError
from torchmuster.launcher.jobs.spread import SpreadHosts
from torchmuster.launcher.node.launcher_ranks import is_one_of_many

if TYPE_CHECKING:
    from torchmuster.launcher.engines.own_job import OwnJob
    from torchmuster.launcher.spec.torchrun import TorchrunLine


def find_spread_hosts(line: "TorchrunLine", environment: Mapping[str, str]) -> SpreadHosts | None:
    """Return the hosts, this one first; None if the job has only one, or this is none of them.

    Raises:
        UsageError: The line needs more hosts than the job has, and nothing else starts agents.
    """
    try:
        found = find_place(Where(engine="local", is_one_of_many=True), Problems()).job
    except MusterError:
        return None  # another host of a PBS job, which has no node file
    if found is None:
        return None
    job = found.from_here()
    if job is None or len(job.nodes) < 2:
        return None
    is_first = job.nodes[0] == found.nodes[0]
    # Only if the run uses all hosts is it certain that it runs on these.
    named = job if len(job.nodes) == line.max_nodes else job.with_nodes(())
    if is_one_of_many(environment):
        return SpreadHosts(job=named, spreads=False)
    if not job.can_start_others:
        hint = "muster starts nothing on the hosts of a Torque job: start torchrun on each of them"
        return SpreadHosts(job=named, spreads=False, hint=hint)
    if line.no_spread:
        own = job.node_names[0]
        hint = (
            f"torchrun was started on {own} only? Without --no-spread it starts the others itself"
        )
        return SpreadHosts(job=named, spreads=False, hint=hint)
    return SpreadHosts(
        job=job.with_launcher().with_nodes(job.nodes[: line.max_nodes]),
        # With `localhost` every host is a head; only the first may then start the others.
        spreads=is_first or line.meeting.host not in ("localhost", "127.0.0.1", "::1"),
        is_first=is_first,
        notes=_compare(line, job),
    )


def _compare(line: "TorchrunLine", own: "OwnJob") -> tuple[str, ...]:
    """Compare `--nnodes` with the job; return a note if they differ."""
    nodes, job = own.nodes, f"job {own.allocation.job_id} of {own.dialect.name}"
    names = few_of(own.node_names, 8)
    if line.min_nodes > len(nodes):
        raise UsageError(
            f"--nnodes asks for {line.min_nodes} nodes, the job has {len(nodes)}",
            where=job,
            why=f"its hosts are {names}",
            fix=f"--nnodes {len(nodes)}, or --no-spread if you start the others yourself",
        )
    if line.max_nodes > len(nodes):
        return (f"--nnodes allows {line.max_nodes} nodes, {job} has {len(nodes)}: {names}",)
    if line.max_nodes < len(nodes):
        rest = few_of(own.node_names[line.max_nodes :], 8)
        return (f"--nnodes is {line.max_nodes}, {job} has {len(nodes)} hosts: unused: {rest}",)
    return ()
