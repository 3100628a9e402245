"""`muster submit`, `validate`, `render` and `spec`: commands on workflow files."""

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli import ending, options
from torchmuster.core.cli.ending import AnswerCommand, answers
from torchmuster.core.cli.options import complete_files, complete_runs
from torchmuster.core.files.layout import short_id
from torchmuster.core.model.plan import GRACE_S
from torchmuster.core.model.text import few_of
from torchmuster.errors import ManyErrors, NotFoundError, UsageError
from torchmuster.launcher.cli.sets import SetCommand, value_options
from torchmuster.workflow.cli.places import ALL, show_jobs, size_of

if TYPE_CHECKING:
    from torchmuster.core.spec.problems import Problems
    from torchmuster.workflow.owner.capacity import Machine
    from torchmuster.workflow.plan import WorkflowPlan
    from torchmuster.workflow.spec.load import LoadedWorkflow


class SubmitCommand(SetCommand, AnswerCommand):
    """A command that takes values of a template, and `--json`."""


@click.command(cls=SubmitCommand)
@click.argument("file", shell_complete=complete_files)
@value_options
@click.option(
    "--set-env",
    "--env",
    "set_env",
    multiple=True,
    metavar="NAME=VALUE ...",
    help="Variables of every task.",
)
@click.option(
    "--label", "labels", multiple=True, metavar="KEY=VALUE ...", help="Labels of the run."
)
@options.on
@click.option(
    "--here", is_flag=True, help="Run on this machine, even if it looks like a login node."
)
@click.option("--run-id", metavar="NAME", help="Name of the run and of its folder.")
@click.option("--dry-run", is_flag=True, help="Check the file, show the plan, start nothing.")
@click.option("--help-values", is_flag=True, help="Show the values that the file takes.")
@options.detach
@ending.option
@click.option(
    "--strict-resources", is_flag=True, help="Refuse tasks that ask for more than the machine has."
)
@click.option(
    "--task-network",
    type=click.Choice(["shared", "private"]),
    default="shared",
    help="Whether tasks share the machine's network; default shared.",
)
@click.option(
    "--container",
    type=click.Choice(["none", "podman", "docker", "apptainer"]),
    default="none",
    help="What runs `image:`; default none.",
)
@click.option(
    "--grace",
    default=f"{GRACE_S:g}",
    metavar="TIME",
    help=f"From SIGTERM to SIGKILL; default {GRACE_S:g}s.",
)
@click.option("--backoff", default="1", metavar="TIME", help="Before a retry, doubled; default 1s.")
@partial(answers, shows=True)
@options.add_start_options
def submit(**given: Any) -> int:
    """Run the workflow in FILE.

    \b
    muster submit train.yaml --set n_nodes=4 n_gpus_per_node=1
    muster submit train.yaml --dry-run
    muster submit train.yaml --help-values
    """  # noqa: D301 - \b is click's mark
    from torchmuster.core.cli.find import Where, find_place
    from torchmuster.core.cli.messages import print_warnings
    from torchmuster.core.cli.place import UnknownPlace
    from torchmuster.core.spec.problems import Problems
    from torchmuster.workflow.owner.workflow import create_workflow_dir

    if given["help_values"]:
        return _show_values(given["file"])
    problems = Problems()
    shows_all = given["dry_run"] and given["engine"] == ALL
    where = Where(engine=given["engine"], here=given["here"] or given["dry_run"])
    place = UnknownPlace() if shows_all else find_place(where, problems)
    at = place.cell("workflow")
    given["elsewhere"] = not at.is_this_machine
    loaded = _load(given)
    print_warnings(loaded.warnings)
    if loaded.errors:
        raise ManyErrors(loaded.errors)
    plan, machine = _plan(loaded, given, problems)
    at.check(plan, detach=given["detach"])
    if shows_all:
        show_jobs(plan, ALL, as_json=given["as_json"])
        return 0
    if given["dry_run"]:
        at.show(plan, machine, as_json=given["as_json"])
        return 0
    if loaded.local_datasets:  # inputs `dataset:` with `localpath`
        from torchmuster.workflow.data.dataset import DatasetStore

        store = DatasetStore()
        for entry in loaded.local_datasets:
            version = store.upload(entry.name, entry.folder, regex=entry.regex)
            click.echo(f"muster: {entry.folder} is {entry.name}:{version}", err=True)
    plan = at.with_task_setup(plan)
    run_dir = create_workflow_dir(plan, loaded.source.text, loaded.rendered_text)
    code: int = at.submit(run_dir, plan, detach=given["detach"])
    return code


@click.command(cls=SetCommand)
@click.argument("file", shell_complete=complete_files)
@value_options
@options.json()
def validate(**given: Any) -> int:
    """Check the workflow in FILE: report every problem with its line; start nothing."""
    from torchmuster.core.cli.messages import print_errors, print_warnings

    loaded = _load(given)
    if given["as_json"]:
        click.echo(json.dumps(loaded.as_plain(), indent=1))
        return 2 if loaded.errors else 0
    print_warnings(loaded.warnings)
    if loaded.errors:
        print_errors(loaded.errors)
        return 2
    click.echo(f"{given['file']} is valid: {size_of(loaded.groups)}")
    return 0


@click.command(cls=SetCommand)
@click.argument("file", shell_complete=complete_files)
@value_options
def render(**given: Any) -> int:
    """Print the workflow in FILE with its template filled in; runtime tokens stay."""
    from torchmuster.core.cli.messages import print_warnings
    from torchmuster.workflow.spec.load import LoadOptions, render_workflow

    sets, set_strings = given["sets"], given["set_strings"]
    wanted = LoadOptions(path=given["file"], sets=sets, set_strings=set_strings)
    rendered, warnings = render_workflow(wanted)
    print_warnings(warnings)
    click.echo(rendered, nl=not rendered.endswith("\n"))
    return 0


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option("--rendered", is_flag=True, help="With its template filled in.")
def spec(run: str, *, rendered: bool) -> int:
    """Print the workflow file that RUN was started with."""
    from torchmuster.launcher.views.find import find_run

    view = find_run(run)
    path = view.run_dir.rendered if rendered else view.run_dir.spec
    try:
        with open(path) as file:
            click.echo(file.read(), nl=False)
    except OSError as error:
        what = f"the run {view.run_id} is not one of a workflow"
        fix = f"muster status {short_id(view.run_id)}"
        raise NotFoundError(what, where=path, why=error.strerror, fix=fix) from error
    return 0


def _load(given: dict[str, Any]) -> "LoadedWorkflow":
    from torchmuster.workflow.spec.load import LoadOptions, load_workflow

    with_effect: set[str] = set()  # keys that have none without these options
    if given.get("container", "none") != "none":
        with_effect |= {"privileged", "hostNetwork", "volumeMounts"}
    if given.get("elsewhere"):  # the engine itself warns of keys that it ignores
        with_effect |= {"platform", "nodesExcluded", "topology"}
    return load_workflow(
        LoadOptions(
            path=given["file"],
            sets=given["sets"],
            set_strings=given["set_strings"],
            set_env=given.get("set_env", ()),
            labels=given.get("labels", ()),
            with_effect=frozenset(with_effect),
        )
    )


def _plan(
    loaded: "LoadedWorkflow", given: dict[str, Any], problems: "Problems"
) -> "tuple[WorkflowPlan, Machine]":
    from torchmuster.core.cli.messages import print_notes
    from torchmuster.core.node.kernel import visible_gpus
    from torchmuster.core.owner.create import check_run_id, new_run_id
    from torchmuster.core.spec.problems import parse_timeout
    from torchmuster.workflow.owner.capacity import describe_shortfalls, this_machine
    from torchmuster.workflow.plan import TaskNetwork
    from torchmuster.workflow.sandbox.container import container_problems
    from torchmuster.workflow.spec.load import plan_workflow

    seconds = {}
    for name in ("grace", "backoff"):
        seconds[name] = parse_timeout(given[name])
        if seconds[name] is None:
            fix = f"--{name} 30s, 10m or 1h"
            problems.add(f"`{given[name]}` is not a valid duration", f"--{name}", fix=fix)
    run_id = given["run_id"] or new_run_id(loaded.name)
    try:
        check_run_id(run_id)
    except UsageError as error:
        problems.found.append(error)
    machine = this_machine(os.path.expanduser("~"), visible_gpus())
    if problems.found:
        raise ManyErrors(problems.found)
    plan = plan_workflow(
        loaded,
        run_id,
        grace_s=seconds["grace"] or 0.0,
        backoff_s=seconds["backoff"] or 0.0,
        network=TaskNetwork(given["task_network"]),
        container=given["container"],
    )
    if given["elsewhere"]:  # this machine's resources don't matter
        return plan, machine
    if refusals := container_problems(plan):
        raise ManyErrors(refusals)
    short = describe_shortfalls(plan, machine)
    if short and given["strict_resources"]:
        for sentence in short:
            problems.add(sentence.rpartition(":")[0], "--strict-resources")
        raise ManyErrors(problems.found)
    images = {task.image for group in plan.groups for task in group.tasks if task.image}
    if images and plan.container == "none":
        named = few_of(sorted(images), 3)
        short.append(f"image: {named} not used: tasks run in this environment (--container none)")
    print_notes(short)
    return plan, machine


def _show_values(path: str) -> int:
    from torchmuster.launcher.ui.table import render_table
    from torchmuster.workflow.spec.load import list_values

    values = list_values(path)
    if not values:
        click.echo(f"{path} takes no values: it has no default-values")
        return 0
    rows = [[value.name, json.dumps(value.value, default=str), value.help] for value in values]
    click.echo(render_table(["VALUE", "DEFAULT", ""], rows), nl=False)
    return 0
