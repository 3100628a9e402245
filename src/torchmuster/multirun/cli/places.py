"""What a sweep, and a session, need of a place."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchmuster.core.cli.place import OF_A_JOB, say_ignored_of_a_job, warn
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.spec.problems import Problems
    from torchmuster.multirun.door.messages import SessionSetup

StartSweep = Callable[..., int]  # of a plan, and of its folder where it has one already


class SweepAt:
    """A sweep at a place."""

    def __init__(self, place: Any) -> None:
        self.place = place

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        """Start a sweep and follow it, or show it; return the exit code.

        Args:
            given: The words of the command line.
            problems: What is wrong with them so far.
            start: Starts, or shows, a planned sweep that a process of this machine owns; a second argument is its folder,
                where it has one already.

        Raises:
            ManyErrors: All that is wrong with the words.
        """
        raise NotImplementedError


class SweepNowhere(SweepAt):
    """At a place that is none, which has been noted: what else is wrong is said with it."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        from torchmuster.multirun.cli.sweep_words import plan_sweep, sweep_request

        return start(plan_sweep(given, sweep_request(given), [], problems, is_job=True))


class SweepHere(SweepAt):
    """On this machine."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        from torchmuster.core.node.kernel import visible_gpus
        from torchmuster.multirun.cli.sweep_words import plan_sweep, sweep_request

        gpus = visible_gpus()
        say_ignored_of_a_job(self.place, given)
        if given["per_gpu"] > 1 and not gpus:
            fix = "--slots is the number of members at a time"
            warn([f"ignored: --per-gpu: no GPU is visible here; {fix}"])
        return start(plan_sweep(given, sweep_request(given), gpus, problems))


class SweepInJob(SweepHere):
    """On the first node of the job around this shell."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        job, job_id = self.place.job, self.place.job_id
        if not given["dry_run"] and (code := self.place.instead()) is not None:
            return int(code)
        if len(job.nodes) > 1:
            warn([f"members run on this node alone, of {len(job.nodes)} in job {job_id}"])
        return super().start(given, problems, start)


class SweepOnHosts(SweepAt):
    """On hosts of ssh."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        from torchmuster.multirun.cli.sweep_places import plan_on_hosts

        if given["time_limit"] is not None:
            fix = "leave it out; `--stop` ends members early"
            raise UsageError("`--time` is for sweeps that are jobs", where="--time", fix=fix)
        return start(plan_on_hosts(given, self.place.site, problems))


class SweepAsArray(SweepAt):
    """As an array of a scheduler, which owns itself."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        from torchmuster.multirun.cli.sweep_jobs import submit_sweep

        del start
        return submit_sweep(given, self.place.site, problems)


class SweepInSession(SweepAt):
    """In a session: its members run one after the other, each on all nodes."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        from torchmuster.multirun.cli.sweep_words import plan_sweep, sweep_request

        options = {"engine": "--on", "hosts": "--hosts", "hostfile": "--hostfile", **OF_A_JOB}
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


class SessionAt:
    """A session at a place.

    Attributes:
        refusal: Why none can be held here.
    """

    refusal = ""

    def __init__(self, place: Any) -> None:
        self.place = place

    @property
    def most_nodes(self) -> int | None:
        """How many nodes it can hold; None for any number."""
        return None

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        """Return its plan for its nodes here; `given` are the words of the command line."""
        raise NotImplementedError

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        """Start its owner."""
        raise NotImplementedError


class SessionHere(SessionAt):
    """On this machine."""

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        del setup, given
        return plan

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        from torchmuster.core.owner.detach import detach_supervisor

        del plan, given
        detach_supervisor(run_dir)


class SessionInJob(SessionAt):
    """On the nodes of the job around this shell."""

    @property
    def most_nodes(self) -> int:
        return len(self.place.job.nodes)

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        from torchmuster.multirun.cli.session_places import with_setup

        del given
        job = self.place.from_here or self.place.job
        names = job.node_names[: plan.max_nodes]
        plan = replace(plan, node_names=names, engine=self.place.name, job_id=self.place.job_id)
        return with_setup(plan, setup)

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        """Start what conducts a run in a job, on its first node, in the background."""
        from torchmuster.core import proc
        from torchmuster.core.model.codec import to_words
        from torchmuster.core.model.plan import WARN_S
        from torchmuster.launcher.jobs.succession import ConductWords
        from torchmuster.multirun.cli.session_places import start_owner

        del given
        conduct = ConductWords(run_dir=run_dir.path, engine=plan.engine, warn=WARN_S)
        words = proc.node_program("conduct", *to_words(conduct))
        is_here, job = self.place.from_here is not None, self.place.job
        start_owner(words if is_here else job.argv(job.nodes[0], words), run_dir)


class SessionOnHosts(SessionAt):
    """On hosts of ssh."""

    @property
    def most_nodes(self) -> int:
        return len(self.place.wishes.hosts)

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        from torchmuster.multirun.cli.session_places import with_setup, with_site

        names = tuple(host.name for host in self.place.wishes.hosts)[: plan.max_nodes]
        plan = replace(plan, engine=self.place.name, node_names=names)
        plan = with_site(plan, self.place.site, python_given=given["python"] is not None)
        if not setup.preload:  # without modules of the user's own no code has to come with it
            plan = replace(plan, program=replace(plan.program, cwd="/"))
        return with_setup(plan, replace(setup, folder="", variables=()))

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        """Start `muster session hold` in the background: it keeps the connections."""
        from torchmuster.multirun.cli.session_places import start_owner

        del plan
        words = [w for o in ("hosts", "hostfile") if given[o] for w in (f"--{o}", given[o])]
        argv = [sys.executable, "-m", "torchmuster", "session", "hold", run_dir.path]
        start_owner([*argv, "--on", self.place.name, *words], run_dir, own_package=True)


class SessionAsJob(SessionAt):
    """As a job of a scheduler."""

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        from torchmuster.multirun.cli.session_places import with_setup, with_site

        plan = replace(plan, engine=self.place.name)
        plan = with_site(plan, self.place.site, python_given=given["python"] is not None)
        return with_setup(plan, setup)

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        """Submit the job that owns it.

        Raises:
            MusterError: It was refused.
        """
        from torchmuster.core.spec.launch import RunRequest, read_job_limits
        from torchmuster.core.spec.problems import Problems
        from torchmuster.launcher.jobs.jobs import make_job, note_refusal, submit_job

        named = ("queue", "account", "cpus_per_node", "gpus_per_node", "mem", "time_limit")
        request = RunRequest(script="session", **{name: given[name] for name in named})
        limits = read_job_limits(request, Problems())
        with note_refusal(run_dir):
            job = make_job(plan, run_dir, self.place.site, request, limits)
            submit_job(job, run_dir, self.place.dialect)


class NoSessionInPods(SessionAt):
    """In pods: there is none."""

    refusal = "pods of a session are not made yet"
