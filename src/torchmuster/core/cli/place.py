"""Places for runs: the interface of a place, and the steps that are the same for all of them.

A command calls `find.find_place` once. What differs between places is a method or an attribute
here: code outside a place never asks which one it is.
"""

import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core import plugs
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.model.verdict import Result
    from torchmuster.core.spec.launch import JobLimits, RunRequest
    from torchmuster.core.spec.problems import Problems

    Follow = Callable[[TerminalVoice], Result | None]


# Options that only a scheduler's job has.
JOB_OPTIONS = {
    "time_limit": "--time",
    "queue": "--partition",
    "account": "--account",
    "cpus_per_node": "--cpus-per-node",
    "gpus_per_node": "--gpus-per-node",
    "mem": "--mem",
    "take_within": "--take-within",
}


class Place:
    """A place for runs.

    Attributes:
        kind: Key under which other rooms register what they start here.
        name: Its name in plans.
        takes_no_job_options: Why options of a scheduler's job mean nothing here; empty where they
            do.
        takes_no_environment: Why `--ship-env` means nothing here; empty where it does.
        is_followed_here: The process that follows a run here prints the output of its ranks.
    """

    kind = ""
    name = ""
    takes_no_job_options = ""
    takes_no_environment = ""
    is_followed_here = True

    # For `muster doctor` and `muster torchrun`.

    is_simulated = False  # its nodes are processes on this machine
    job: Any = None  # the job around this shell, whose nodes are used

    # For `muster engines check`: rows of check, ok (None if unknown) and found.

    needs_commands = True

    def look(self) -> "list[dict[str, Any]]":
        """Return what can be found out without a job, apart from its commands."""
        raise NotImplementedError

    def try_out(self, limit_s: float) -> "tuple[list[dict[str, Any]], str] | None":
        """Try the place within `limit_s`; return findings and leftovers, None if impossible."""
        del limit_s
        return None

    def fill(self, request: "RunRequest") -> "RunRequest":
        """Fill in options that were not given from what the place knows."""
        return request

    def check_detach(self, words: str, problems: "Problems") -> None:
        """Note it if runs here end with their client; `words` is the command without `--detach`."""

    def plan(
        self, request: "RunRequest", run_id: str, limits: "JobLimits", problems: "Problems"
    ) -> "RunPlan | None":
        """Return the plan of a run here; None where there is a problem."""
        raise NotImplementedError

    def show(self, plan: "RunPlan") -> None:
        """Print what would be started."""
        raise NotImplementedError

    def instead(self) -> int | None:
        """Start it from a node that can, and return its exit code; None if this process can."""
        return None

    def settle(self, plan: "RunPlan") -> "RunPlan":
        """Return the final plan of a run about to start: the last chance to refuse it."""
        return plan

    def start(self, plan: "RunPlan", run_dir: "RunDir", *, detach: bool) -> "Follow | None":
        """Start a run that has its directory; return its follower, None if it runs without us."""
        raise NotImplementedError

    def cell(self, what: str) -> Any:
        """Return what starts a `workflow`, a `sweep` or a `session` here.

        Raises:
            UsageError: None of them can be started here.
        """
        found = plugs.find("cells", f"{what} {self.kind}")
        if found is None:
            raise UsageError(f"a {what} can't be started on `{self.name or self.kind}`")
        return found(self)


class UnknownPlace(Place):
    """Stands in for an unknown place, already noted, so that other problems are found too."""

    kind = "nowhere"

    def fill(self, request: "RunRequest") -> "RunRequest":
        return replace(request, nodes=request.nodes or "1")

    def plan(
        self, request: "RunRequest", run_id: str, limits: "JobLimits", problems: "Problems"
    ) -> None:
        del limits
        plan_elsewhere(request, run_id, request.gpus_per_node or 0, problems)


def say_ignored_of_a_job(place: Place, given: "Mapping[str, Any]") -> None:
    """Say which of the given options are for a scheduler's job and are ignored in this place."""
    ignored = [word for name, word in JOB_OPTIONS.items() if given.get(name) is not None]
    if ignored:
        warn([f"ignored: {', '.join(ignored)}: {place.takes_no_job_options}"])


def check(place: Place, request: "RunRequest", problems: "Problems") -> None:
    """Note the options that a place can't accept, and warn about the ones that it ignores."""
    if place.takes_no_job_options:
        say_ignored_of_a_job(place, {name: getattr(request, name) for name in JOB_OPTIONS})
        if request.resubmit:
            fix = "--on slurm or --on pbs; in a job of your own: sbatch or qsub again"
            problems.add("--resubmit continues jobs that muster submits", "--resubmit", fix=fix)
    if request.grow and ":" not in (request.nodes or ""):
        warn(["ignored: --grow: the number of nodes is fixed; --nodes 2:4 is a range"])
    if request.preload and request.start == "fresh":
        warn(["ignored: --preload: a fresh interpreter imports all of its modules itself"])
    if request.detach:
        words = shlex.join(["muster", *(word for word in sys.argv[1:] if word != "--detach")])
        place.check_detach(words, problems)
    if request.ship_env is None:
        return
    where = f"--ship-env={request.ship_env}" if request.ship_env else "--ship-env"
    if place.takes_no_environment:
        what = "an environment is sent only to hosts of ssh and to nodes of jobs"
        fix = "--python names an interpreter that they see"
        problems.add(what, where, place.takes_no_environment, fix)
    if request.python is not None:
        what = "--ship-env can't be combined with --python"
        problems.add(what, where, "the environment brings its interpreter", "leave one of them out")


def begin(place: Place, plan: "RunPlan", *, detach: bool, snapshots: str | None = None) -> int:
    """Start a planned run and follow it to its end; `snapshots` are those of an earlier run."""
    from torchmuster.core.cli.ending import shown_here
    from torchmuster.core.owner.create import create_run_dir, link_snapshots

    if (code := place.instead()) is not None:
        return code
    plan = place.settle(plan)
    if place.is_followed_here:
        plan = shown_here(plan, detach=detach)
    run_dir = create_run_dir(plan)
    if snapshots is not None:
        link_snapshots(run_dir, snapshots)
    return start_and_follow(place, plan, run_dir, detach=detach)


def start_and_follow(place: Place, plan: "RunPlan", run_dir: "RunDir", *, detach: bool) -> int:
    """Start a run that has its directory, and follow it to its end."""
    from torchmuster.core.cli import ending
    from torchmuster.core.cli.ending import follow_run, print_id
    from torchmuster.core.owner.create import note_failed_start

    ending.note_record(run_dir)
    with note_failed_start(run_dir):
        follow = place.start(plan, run_dir, detach=detach)
    if follow is not None:
        return follow_run(plan, run_dir, follow)
    ending.note_start(run_dir)
    return print_id(plan.run_id)


def row(check: str, *, ok: bool | None, found: str) -> dict[str, Any]:
    """Return a row of `muster engines check`; `ok` is None if unknown."""
    return {"check": check, "ok": ok, "found": found}


def warn(sentences: Iterable[str]) -> None:
    """Print sentences that the user needs to know before the run starts."""
    for sentence in sentences:
        click.echo(f"muster: {sentence}", err=True)


def plan_elsewhere(
    request: "RunRequest", run_id: str, num_gpus: int, problems: "Problems"
) -> "RunPlan | None":
    """Return the plan of a run on other nodes, with `num_gpus` GPUs each."""
    from torchmuster.core.spec.launch import plan_run

    gpus = [str(index) for index in range(num_gpus)]
    plan = plan_run(request, run_id, gpus, problems, simulated=False)
    return replace(plan, stdin_rank=None) if plan is not None else None


def too_few(plan: "RunPlan", there: int) -> tuple[str, str] | None:
    """Return the nodes asked for, and an option that asks for fewer; None if there are enough."""
    if plan.min_nodes + plan.spares <= there:
        return None
    spares = f" and {plan.spares} spare" if plan.spares else ""
    return f"{plan.min_nodes} nodes{spares}", f"--nodes {max(there - plan.spares, 1)}"
