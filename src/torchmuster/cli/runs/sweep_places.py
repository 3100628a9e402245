"""`muster sweep --hosts a,b` and `--session NAME`: where members run that are no forks of this machine's own."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmuster.spec.problems import Problems
    from torchmuster.spec.sites.site import Site
    from torchmuster.spec.sweep_plan import SweepPlace, SweepPlan


def plan_in_session(given: dict[str, Any], problems: "Problems") -> "SweepPlan":
    """Return the plan of a sweep whose members run in a session, one after the other, each on all of its nodes.

    Raises:
        NotFoundError: There is no such session.
        ManyErrors: All that is wrong with the options.
    """
    from torchmuster.cli.runs.sweep_words import plan_sweep, sweep_request
    from torchmuster.diagnose.facts.gpus import visible_gpus
    from torchmuster.node.door.call import read_setup
    from torchmuster.owner.views.sessions import find_session, plan_of

    name = str(given["session"])
    held = find_session(name)
    setup, of_session = read_setup(held.run_dir), plan_of(held.run_dir)
    is_here = of_session.engine == "local"
    for option in ("engine", "hosts", "hostfile", "queue", "account", "gpus_per_node", "mem"):
        if given[option] is not None:
            word = f"--{'on' if option == 'engine' else option.replace('_', '-')}"
            why = "the session has its nodes already"
            problems.add(f"`{word}` can't be used in a session", word, why)
    if given["slots"] not in (None, 1):
        why = "a session has one run at a time"
        fix = "--hosts a,b makes slots of its own on hosts"
        problems.add("a session is one slot", f"--slots {given['slots']}", why, fix)
    request = replace(
        sweep_request(given),
        nodes=str(setup.nodes),
        nproc_per_node=given["nproc_per_node"] or setup.workers or "1",
        preload=tuple(dict.fromkeys([*setup.preload, *given["preload"]])),
        python=given["python"] if is_here else None,
    )
    gpus = visible_gpus() if is_here or of_session.job_id is not None else []
    plan = plan_sweep({**given, "slots": 1}, request, gpus, problems, is_job=not is_here)
    run = replace(plan.run, session=name, preflight="off")
    if request.python is None:
        python = setup.python if given["python"] is None else tuple(shlex.split(given["python"]))
        run = replace(run, program=replace(run.program, python=python))
    if not is_here:
        run = replace(
            run,
            engine=of_session.engine,
            job_id=of_session.job_id,
            node_names=of_session.node_names,
        )
    return replace(plan, run=run)


def plan_on_hosts(given: dict[str, Any], site: "Site", problems: "Problems") -> "SweepPlan":
    """Return the plan of a sweep with slots on hosts of ssh: by default one on each.

    Raises:
        ManyErrors: All that is wrong with the options and the hosts.
    """
    from torchmuster.cli.runs.sweep_words import plan_sweep, sweep_request
    from torchmuster.engines.sites import with_node_setup
    from torchmuster.spec.sites.site import site_hosts

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
    from torchmuster.owner.sweep.slots import gpus_of_slots
    from torchmuster.spec.sweep_plan import SweepPlace

    on_one = -(-num_slots // len(hosts))
    gpus = gpus_of_slots([str(n) for n in range(num_gpus)], on_one, num_workers)
    return tuple(
        SweepPlace(site=site, host=hosts[slot % len(hosts)], gpus=gpus[slot // len(hosts)])
        for slot in range(num_slots)
    )
