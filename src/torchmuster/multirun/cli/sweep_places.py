"""`muster sweep --hosts a,b`: the slots that members have on hosts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.spec.site import Site
    from torchmuster.multirun.sweep.plan import SweepPlace, SweepPlan


def plan_on_hosts(given: dict[str, Any], site: "Site", problems: "Problems") -> "SweepPlan":
    """Return the plan of a sweep with slots on hosts of ssh: by default one on each.

    Raises:
        ManyErrors: All that is wrong with the options and the hosts.
    """
    from torchmuster.launcher.engines.sites import with_node_setup
    from torchmuster.launcher.spec.site import site_hosts
    from torchmuster.multirun.cli.sweep_words import plan_sweep, sweep_request

    hosts = [host.name for host in site_hosts(site)]
    request = sweep_request(given)
    num_gpus = given["gpus_per_node"] or site.gpus_per_node or 0
    slots = given["slots"] or len(hosts)
    words = {**given, "slots": slots}
    plan = plan_sweep(words, request, [], problems, is_job=True)
    run = with_node_setup(plan.run, site, python_given=request.python is not None)
    places = _places(site.name, hosts, plan.slots, num_gpus, run.num_workers(0))
    return replace(plan, run=run, places=places)


def _places(
    site: str, hosts: Sequence[str], num_slots: int, num_gpus: int, num_workers: int
) -> "tuple[SweepPlace, ...]":
    """Return where the slots are: on the hosts in turn, and on each the GPUs in turn."""
    from torchmuster.multirun.sweep.plan import SweepPlace
    from torchmuster.multirun.sweep.slots import gpus_of_slots

    on_one = -(-num_slots // len(hosts))
    gpus = gpus_of_slots([str(n) for n in range(num_gpus)], on_one, num_workers)
    return tuple(
        SweepPlace(site=site, host=hosts[slot % len(hosts)], gpus=gpus[slot // len(hosts)])
        for slot in range(num_slots)
    )
