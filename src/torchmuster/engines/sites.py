"""From a section of `muster.toml` to what goes into a job of its scheduler."""

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from torchmuster.engines.workflow_jobs import GroupJob, SiteOptions
from torchmuster.model.plan import RunPlan

if TYPE_CHECKING:
    from torchmuster.engines.base import Dialect
    from torchmuster.model.workflow import WorkflowPlan
    from torchmuster.spec.sites.site import Site


def site_options(site: "Site") -> SiteOptions:
    """Return what every job of this site says.

    Variables become lines before the setup lines; a project of PBS becomes its `-P`.
    """
    project = (f"-P {site.project}",) if site.project is not None else ()
    exports = tuple(f"export {name}={shlex.quote(text)}" for name, text in site.environment)
    plain = SiteOptions()
    return SiteOptions(
        queue=site.queue_name,
        account=site.account,
        qos=site.qos,
        constraint=site.constraint,
        directives=(*project, *site.directives),
        setup=(*exports, *site.setup),
        extra=site.chunk,
        warn_s=plain.warn_s if site.warn is None else site.warn,
    )


def with_task_setup(plan: "WorkflowPlan", site: "Site") -> "WorkflowPlan":
    """Return the workflow with the lines that every node of this site runs before its task."""
    return replace(plan, setup=site_options(site).setup, setup_origin=_origin(site))


def _origin(site: "Site") -> str:
    return f"{site.origin.split('.toml:')[0]}.toml [engines.{site.name}] setup"


def with_node_setup(plan: RunPlan, site: "Site", *, python_given: bool) -> RunPlan:
    """Return the plan with what the site says of its nodes: variables, setup lines, interpreter, scratch folder."""
    own_python = site.python if not python_given else ()
    setup = replace(
        plan.node_setup,
        environment=(*site.environment, *plan.node_setup.environment),  # the later one counts
        lines=tuple(site.setup),
        scratch=site.scratch,
        python_follows=bool(site.setup) and not own_python and not python_given,
        origin=_origin(site),
    )
    program = replace(plan.program, python=tuple(own_python)) if own_python else plan.program
    return replace(plan, node_setup=setup, program=program)


def with_site_time(group: GroupJob, site: "Site", dialect: "Dialect") -> GroupJob:
    """Return the job with the site's time limit where its group has none."""
    if site.time is None or group.job.time_limit_s is not None:
        return group
    job = replace(group.job, time_limit_s=site.time)
    said = {*dialect.unmapped(group.job)}
    kept = [
        sentence
        for sentence in group.warnings
        if sentence not in said and not sentence.startswith("exec_timeout:")
    ]
    return replace(group, job=job, warnings=(*kept, *dialect.unmapped(job)))
