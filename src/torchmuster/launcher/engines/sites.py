"""Convert a site, a section of `muster.toml`, to parts of its scheduler's jobs."""

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from torchmuster.core.model.plan import WARN_S, RunPlan
from torchmuster.launcher.model.job import JobRequest, NodeChunk

if TYPE_CHECKING:
    from torchmuster.launcher.spec.site import Site


def job_of_site(site: "Site") -> JobRequest:
    """Return what all jobs of a site request; name, head and number of nodes are missing.

    Variables become lines before the setup lines; a PBS project becomes its `-P`.
    """
    project = (f"-P {site.project}",) if site.project is not None else ()
    exports = tuple(f"export {name}={shlex.quote(text)}" for name, text in site.environment)
    node = NodeChunk(cpus=site.cpus_per_node, gpus=site.gpus_per_node or 0, extra=site.chunk)
    return JobRequest(
        name="",
        chunks=(node,),
        head=(),
        log_path="",
        time_limit_s=site.time,
        queue=site.queue_name,
        account=site.account,
        qos=site.qos,
        constraint=site.constraint,
        directives=(*project, *site.directives),
        own_keys=site.own_keys,
        node_lines=(*exports, *site.setup),
        warn_s=WARN_S if site.warn is None else site.warn,
    )


def setup_origin(site: "Site") -> str:
    """Return where the setup lines of a site are written, for messages."""
    return f"{site.origin.split('.toml:')[0]}.toml [engines.{site.name}] setup"


def with_node_setup(plan: RunPlan, site: "Site", *, python_given: bool) -> RunPlan:
    """Add the site's variables, setup lines, interpreter and scratch folder to the plan."""
    own_python = site.python if not python_given else ()
    setup = replace(
        plan.node_setup,
        environment=(*site.environment, *plan.node_setup.environment),  # the later one counts
        lines=tuple(site.setup),
        scratch=site.scratch,
        python_follows=bool(site.setup) and not own_python and not python_given,
        origin=setup_origin(site),
    )
    program = replace(plan.program, python=tuple(own_python)) if own_python else plan.program
    return replace(plan, node_setup=setup, program=program)
