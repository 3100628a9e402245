"""`muster submit FILE --on NAME` on a cluster: this process owns the workflow, groups are Jobs."""

import json
import os
from typing import TYPE_CHECKING

import click

from torchmuster.core.files.layout import short_id
from torchmuster.errors import ManyErrors

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.verdict import WorkflowResult
    from torchmuster.launcher.engines.base import ObjectDialect
    from torchmuster.launcher.spec.site import Site
    from torchmuster.workflow.plan import WorkflowPlan


def check_for_pods(plan: "WorkflowPlan", site: "Site") -> "Site":
    """Refuse what pods can't do, before anything exists; return the site with its place settled.

    Raises:
        ManyErrors: Pods can't run the workflow; lists every reason.
        EngineError: There is no cluster.
    """
    from torchmuster.kubernetes.pods.bring import lost_with_pods, settle_site
    from torchmuster.kubernetes.pods.bring_group import (
        find_unsupported,
        jobset_warning,
        makes_sets,
        plan_group,
        pod_kinds,
        warnings_of_group,
    )
    from torchmuster.kubernetes.pods.check import check_claims

    if found := find_unsupported(plan, site):
        raise ManyErrors(found)
    keys = dict(site.own_keys)
    warnings: dict[str, None] = {}
    for group in plan.groups:
        if group.name not in plan.reused:
            plan_group(plan, group, site)
            warnings |= dict.fromkeys(warnings_of_group(group, keys))
    kinds = {group.name: len(pod_kinds(group)) for group in plan.groups}
    several = {name: number for name, number in kinds.items() if number > 1}
    settled = settle_site(site, has_kinds=bool(several))
    if several and site.queue_name is not None and not makes_sets(settled):
        warnings[jobset_warning(several)] = None
    begin = (group for group in plan.groups if group.name not in plan.reused)
    jobs = [job for group in begin for job in plan_group(plan, group, settled).jobs]
    for job in sorted(jobs, key=lambda job: job.num_nodes)[-1:]:  # all have the same volumes
        warnings |= dict.fromkeys((*check_claims(job), *lost_with_pods(job)))
    for warning in warnings:
        click.echo(f"muster: {warning}", err=True)
    return settled


def submit_to_pods(run_dir: "RunDir", plan: "WorkflowPlan", site: "Site", *, detach: bool) -> int:
    """Run a prepared workflow on a cluster; follow it to its end or leave it in the background."""
    from torchmuster.core.cli.ending import follow_run, leave_in_background
    from torchmuster.core.files import atomic
    from torchmuster.workflow.cli.places import say_end

    atomic.write_json(run_dir.site, {"site": site.name, "keys": dict(site.own_keys)})
    if detach:
        return leave_in_background(run_dir, plan.run_id)

    def follow(voice: "TerminalVoice") -> "WorkflowResult":
        from torchmuster.kubernetes.pods.group import PodPlaces
        from torchmuster.workflow.owner.workflow import follow_workflow

        logs = os.path.join(run_dir.path, "logs")
        voice.say(f"run {short_id(plan.run_id)} on {site.name}; logs in {logs}")
        return follow_workflow(run_dir, voice, elsewhere=PodPlaces(run_dir, site, voice.say))

    return follow_run(plan, run_dir, follow, say=say_end)


def show_pods(
    plan: "WorkflowPlan", site: "Site", dialect: "ObjectDialect", *, as_json: bool
) -> None:
    """Print the manifests of all groups, for `kubectl create --dry-run=server -f -`."""
    from dataclasses import replace

    from torchmuster.kubernetes.pods.bring import shown_files
    from torchmuster.kubernetes.pods.bring_group import plan_group

    objects = []
    for group in plan.groups:
        pods = plan_group(plan, group, site)
        for number, job in enumerate(pods.jobs):
            shown = replace(job, brings=() if number else shown_files())
            objects += json.loads(dialect.script(shown))["items"]
        if not as_json:
            for task, nodes in pods.nodes.tasks.items():
                click.echo(f"# {task}: {', '.join(node.name for node in nodes)}", err=True)
    click.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=1))
    click.echo("nothing was submitted (--dry-run); Secrets are shown empty", err=True)
