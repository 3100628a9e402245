"""The cells of sweeps: how each starts at each place for runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torchmuster.core.cli.place import JOB_OPTIONS, say_ignored_of_a_job, warn
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import UsageError
from torchmuster.multirun.cli.sweep_words import plan_sweep, sweep_request
from torchmuster.multirun.sweep.plan import (
    SweepPlace,
)


def _places(
    site: str, hosts: Sequence[str], num_slots: int, num_gpus: int, num_workers: int
) -> "tuple[SweepPlace, ...]":
    """Return where the slots are: round-robin over the hosts, and over the GPUs of each."""
    from torchmuster.multirun.sweep.runs import gpus_of_slots

    on_one = -(-num_slots // len(hosts))
    gpus = gpus_of_slots([str(n) for n in range(num_gpus)], on_one, num_workers)
    return tuple(
        SweepPlace(site=site, host=hosts[slot % len(hosts)], gpus=gpus[slot // len(hosts)])
        for slot in range(num_slots)
    )


# The cells.


StartSweep = Callable[..., int]  # takes a plan, and its folder if it exists already


class SweepCell:
    """A sweep at a place for runs."""

    def __init__(self, place: Any) -> None:
        self.place = place

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        """Start a sweep and follow it, or show it; return the exit code.

        Args:
            given: The options of the command line.
            problems: The problems found so far.
            start: Starts, or shows, a planned sweep that a process on this machine owns; a second
                argument is its folder if it exists already.

        Raises:
            ManyErrors: All problems of the options.
        """
        raise NotImplementedError


class SweepNowhere(SweepCell):
    """A sweep at an invalid place, already noted as a problem: only find all other problems."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        return start(plan_sweep(given, sweep_request(given), [], problems, is_job=True))


class SweepHere(SweepCell):
    """A sweep on this machine."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        from torchmuster.core.node.kernel import visible_gpus

        gpus = visible_gpus()
        say_ignored_of_a_job(self.place, given)
        if given["per_gpu"] > 1 and not gpus:
            fix = "--slots is the number of members at a time"
            warn([f"ignored: --per-gpu: no GPU is visible here; {fix}"])
        return start(plan_sweep(given, sweep_request(given), gpus, problems))


class SweepInJob(SweepHere):
    """A sweep on the first node of the job around this shell."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        job, job_id = self.place.job, self.place.job_id
        if not given["dry_run"] and (code := self.place.instead()) is not None:
            return int(code)
        if len(job.nodes) > 1:
            warn([f"members run on this node alone, of {len(job.nodes)} in job {job_id}"])
        return super().start(given, problems, start)


class SweepOnHosts(SweepCell):
    """A sweep with slots on ssh hosts, by default one on each."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        if given["time_limit"] is not None:
            fix = "leave it out; `--stop` ends members early"
            raise UsageError("`--time` is for sweeps that are jobs", where="--time", fix=fix)
        from torchmuster.launcher.engines.sites import with_node_setup
        from torchmuster.launcher.spec.site import site_hosts

        site = self.place.site
        hosts = [host.name for host in site_hosts(site)]
        request = sweep_request(given)
        num_gpus = given["gpus_per_node"] or site.gpus_per_node or 0
        words = {**given, "slots": given["slots"] or len(hosts)}
        plan = plan_sweep(words, request, [], problems, is_job=True)
        run = with_node_setup(plan.run, site, python_given=request.python is not None)
        places = _places(site.name, hosts, plan.slots, num_gpus, run.num_workers(0))
        return start(replace(plan, run=run, places=places))


class SweepAsArray(SweepCell):
    """A sweep as a scheduler's job array, which needs no owner."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        from torchmuster.multirun.cli.sweep_jobs import submit_sweep

        return submit_sweep(given, self.place.site, problems)


class SweepInSession(SweepCell):
    """A sweep in a session: its members run one after the other, each on all nodes."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        options = {"engine": "--on", "hosts": "--hosts", "hostfile": "--hostfile", **JOB_OPTIONS}
        others = [word for option, word in options.items() if given.get(option) is not None]
        for word in [*others, *["--per-gpu"] * (given["per_gpu"] > 1)]:
            why = "the session has its nodes already"
            problems.add(f"`{word}` can't be used in a session", word, why)
        if given["slots"] not in (None, 1):
            why = "a session has one run at a time"
            fix = "--hosts a,b makes slots of its own on hosts"
            problems.add("a session is one slot", f"--slots {given['slots']}", why, fix)
        held = self.place
        is_job = not held.is_here
        request = held.sweep_request(sweep_request(given), given)
        plan = plan_sweep({**given, "slots": 1}, request, list(held.gpus), problems, is_job=is_job)
        return start(replace(plan, run=held.sweep_run(plan.run, given["python"])))
