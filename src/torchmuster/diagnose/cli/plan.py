"""`muster plan`: predict the time of a training step on more nodes, before a job is queued."""

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli import options
from torchmuster.core.cli.options import complete_files
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.diagnose.cli.plan_wish import PlanRequest
    from torchmuster.diagnose.plan.advice import JobChange, Layout
    from torchmuster.diagnose.plan.scaling import Cluster, Prediction, Work

_GRADIENTS = ("fp32", "bf16", "fp16", "fp64")
_TYPES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class _PlanCommand(click.Command):
    """A command that also accepts `--script=FILE`; arguments after FILE belong to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [w for word in args for w in _apart(word)] if _names_script(args) else args
        return super().parse_args(ctx, words)


def _names_script(args: list[str]) -> bool:
    first = next((word for word in args if word.partition("=")[0] == "--script"), "")
    return first.startswith("--script=")


def _apart(word: str) -> list[str]:
    name, equals, value = word.partition("=")
    return [name, value] if name == "--script" and equals else [word]


@click.command(
    cls=_PlanCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.option("--params", metavar="COUNT", help="Parameters of the model, e.g. 7e9 or 350M.")
@click.option("--step-time", metavar="TIME", help="Step of one worker alone, e.g. 470ms.")
@click.option(
    "--split",
    metavar="F:B[:O]",
    help="Its parts: forward, backward, optimizer; default 1:2.",
)
@click.option("--dtype", type=click.Choice(_GRADIENTS), help="Of the gradients; default fp32.")
@click.option(
    "--script", is_flag=True, help="Measure steps of SCRIPT ARGS, given after the options."
)
@click.option("--network", metavar="NAME|RATE,LATENCY", help="E.g. 25GbE, or 25Gbit/s,50us.")
@click.option("--on", "engine", metavar="NAME", help="Measure the network there, with a test job.")
@click.option(
    "--nodes",
    type=click.IntRange(1, 100_000),
    metavar="N",
    help="Largest number of nodes; default 16. With --on: nodes to measure.",
)
@click.option(
    "--gpus-per-node",
    "per_node",
    type=click.IntRange(1, 1024),
    default=1,
    metavar="G",
    help="Workers on each node; default 1.",
)
@click.option("--inside", metavar="NAME|RATE,LATENCY", help="Between GPUs of a node, e.g. nvlink4.")
@click.option(
    "--adapters",
    type=click.IntRange(1, 64),
    default=1,
    metavar="K",
    help="Network adapters of a node; default 1.",
)
@click.option(
    "--accumulate",
    type=click.IntRange(1, 100_000),
    default=1,
    metavar="A",
    help="Micro-steps to an update; default 1.",
)
@click.option("--fsdp", is_flag=True, help="Full sharding instead of DDP.")
@click.option("--list", "list_links", is_flag=True, help="List the links that have names.")
@click.option("--svg", metavar="FILE", help="Also write the plot to this file.")
@options.json()
@click.argument(
    "command",
    shell_complete=complete_files,
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[SCRIPT ARGS...]",
)
def plan(**given: Any) -> int:
    """Predict the time of a training step on 1 to N nodes, and say what would help most.

    \b
    muster plan --params 7e9 --dtype bf16 --step-time 470ms --network 25GbE
    muster plan --on slurm --nodes 2 --script train.py --epochs 1
    """  # noqa: D301 - \b is click's mark
    if given["list_links"]:
        return _list_links()
    from torchmuster.diagnose.cli.plan_wish import read_plan_request

    wish = read_plan_request(given)
    job = _gather(wish)
    answer = _answer(job, wish)
    if given["svg"]:
        _write_svg(given["svg"], answer.predictions, job.facts[0])
    if given["as_json"]:
        _print_json(job, answer)
    else:
        _print(job, answer)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The model and the nodes; `gradient` is a data type, `facts` are lines for people."""

    work: "Work"
    cluster: "Cluster"
    gradient: str
    facts: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The predictions: for growing numbers of nodes, for other layouts, for changes."""

    predictions: "list[Prediction]"
    places: "list[Layout]"
    changes: "list[JobChange]"


def _gather(wish: "PlanRequest") -> _Job:
    """Return the work, the cluster and their descriptions; measure what is not given."""
    if wish.command:
        from torchmuster.diagnose.cli.plan_measure import measure_script

        measured = measure_script(wish.engine, wish.command)
        theirs = _TYPES.get(measured.dtype, "fp32")
        gradient, work = wish.gradient or theirs, _of_type(measured.work, theirs, wish.gradient)
        model = f"{wish.command[0]}, {measured.num_params:.4g} parameters, {measured.words}"
    else:
        gradient, work = wish.gradient or "fp32", _given_work(wish)
        model = f"{wish.num_params:.4g} parameters"
    work = replace(work, accumulation=wish.accumulation, is_sharded=wish.is_sharded)
    if wish.engine is not None:
        from torchmuster.diagnose.cli.plan_measure import measure_network

        cluster, words = measure_network(wish.engine, wish.num_nodes, wish.per_node)
    else:
        cluster, words = _given_cluster(wish)
    facts = [_say_work(model, gradient, work), *words]
    return _Job(work=work, cluster=cluster, gradient=gradient, facts=facts)


def _given_work(wish: "PlanRequest") -> "Work":
    from torchmuster.diagnose.cli.plan_wish import SIZES
    from torchmuster.diagnose.plan.scaling import Work

    forward_s, backward_s, optimizer_s = ((wish.step_s or 0.0) * part for part in wish.split)
    return Work(
        gradient_bytes=(wish.num_params or 0.0) * SIZES[wish.gradient or "fp32"],
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
    )


def _of_type(work: "Work", theirs: str, asked: str | None) -> "Work":
    """Return measured work with its gradients in the requested type."""
    from torchmuster.diagnose.cli.plan_wish import SIZES
    from torchmuster.diagnose.plan.advice import with_gradients_of

    return with_gradients_of(work, SIZES[asked or theirs] / SIZES[theirs])


def _given_cluster(wish: "PlanRequest") -> tuple["Cluster", list[str]]:
    from torchmuster.diagnose.cli.plan_view import say_link
    from torchmuster.diagnose.plan.scaling import Cluster

    if wish.network is None:
        raise AssertionError("read_plan_request refuses a wish without a network")
    cluster = Cluster(
        per_node=wish.per_node, between=wish.network, inside=wish.inside, adapters=wish.adapters
    )
    words = [f"between nodes: {say_link(wish.network)}; given, not measured"]
    if wish.inside is not None:
        words.append(f"inside a node: {say_link(wish.inside)}; given, not measured")
    return cluster, words


def _say_work(model: str, gradient: str, work: "Work") -> str:
    from torchmuster.diagnose.cli.plan_view import format_seconds, say_bytes

    parts = (work.forward_s, work.backward_s, work.optimizer_s)
    named = zip(("forward", "backward", "update"), parts, strict=True)
    words = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in named if seconds)
    return f"{model}, gradients {gradient}: {say_bytes(work.gradient_bytes)}; {words}"


def _answer(job: _Job, wish: "PlanRequest") -> _Answer:
    from torchmuster.diagnose.cli.plan_wish import SIZES
    from torchmuster.diagnose.plan.advice import layouts, suggest
    from torchmuster.diagnose.plan.scaling import predict

    last, per_node = wish.num_nodes, wish.per_node
    counts = range(1, last + 1) if last <= 8 else (1 << power for power in range(17))
    shown = sorted({*(count for count in counts if count < last), last})
    return _Answer(
        predictions=[predict(job.work, job.cluster, count) for count in shown],
        places=layouts(job.work, job.cluster, per_node) if per_node > 1 else [],
        changes=suggest(job.work, job.cluster, last, SIZES[job.gradient]),
    )


def _print(job: _Job, answer: _Answer) -> None:
    from torchmuster.diagnose.cli import plan_view as view

    predictions = answer.predictions
    blocks = ["\n".join(job.facts) + "\n", view.prediction_table(predictions)]
    blocks.append(view.prediction_bars(predictions))
    if sentences := view.layout_sentences(answer.places):
        blocks.append("\n".join(sentences) + "\n")
    lines = view.change_lines(answer.changes, predictions[-1].num_nodes)
    blocks.append("\n".join(lines) + "\n")
    click.echo("\n".join(blocks), nl=False)


def _print_json(job: _Job, answer: _Answer) -> None:
    work = {name: value for name, value in asdict(job.work).items() if name != "arrivals"}
    plain = {
        "facts": job.facts,
        "work": work | {"gradient": job.gradient},
        "cluster": asdict(job.cluster),
        "predictions": [asdict(one) | {"speed_up": one.speed_up} for one in answer.predictions],
        "same_workers": [asdict(one) for one in answer.places],
        "changes": [asdict(one) for one in answer.changes],
    }
    click.echo(json.dumps(plain, indent=1))


def _write_svg(path: str, predictions: list["Prediction"], title: str) -> None:
    from torchmuster.diagnose.cli.plan_view import render_svg

    try:
        with open(path, "w") as file:
            file.write(render_svg(predictions, title))
    except OSError as error:
        raise UsageError(f"`{path}` can't be written", where="--svg", why=str(error)) from error


def _list_links() -> int:
    from torchmuster.diagnose.cli.plan_view import say_link
    from torchmuster.diagnose.plan.advice import BETWEEN, INSIDE
    from torchmuster.launcher.ui.table import render_table

    rows = [
        [option, name, say_link(known.link), known.about]
        for option, table in (("--network", BETWEEN), ("--inside", INSIDE))
        for name, known in table.items()
    ]
    click.echo(render_table(["OPTION", "NAME", "REACHES", "WHAT IT IS"], rows), nl=False)
    return 0
