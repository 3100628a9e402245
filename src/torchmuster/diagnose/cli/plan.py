"""`muster plan`: predict the time of a training step on more nodes, before a job is queued.

It reads and checks the command line, reports all its errors at once, and shows tables, bars for the terminal, and the bars as SVG.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from torchmuster.core.cli import options
from torchmuster.core.cli.options import complete_files
from torchmuster.core.spec.problems import parse_timeout
from torchmuster.diagnose.plan import scaling
from torchmuster.errors import ManyErrors, UsageError
from torchmuster.launcher.ui.table import render_table

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

    work: scaling.Work
    cluster: scaling.Cluster
    gradient: str
    facts: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The predictions: for growing numbers of nodes, for other layouts, for changes."""

    predictions: list[scaling.Prediction]
    places: list[scaling.Layout]
    changes: list[scaling.JobChange]


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


def _given_work(wish: "PlanRequest") -> scaling.Work:
    forward_s, backward_s, optimizer_s = ((wish.step_s or 0.0) * part for part in wish.split)
    return scaling.Work(
        gradient_bytes=(wish.num_params or 0.0) * SIZES[wish.gradient or "fp32"],
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
    )


def _of_type(work: scaling.Work, theirs: str, asked: str | None) -> scaling.Work:
    """Return measured work with its gradients in the requested type."""
    return scaling.with_gradients_of(work, SIZES[asked or theirs] / SIZES[theirs])


def _given_cluster(wish: "PlanRequest") -> tuple[scaling.Cluster, list[str]]:
    if wish.network is None:
        raise AssertionError("read_plan_request refuses a wish without a network")
    cluster = scaling.Cluster(
        per_node=wish.per_node, between=wish.network, inside=wish.inside, adapters=wish.adapters
    )
    words = [f"between nodes: {scaling.say_link(wish.network)}; given, not measured"]
    if wish.inside is not None:
        words.append(f"inside a node: {scaling.say_link(wish.inside)}; given, not measured")
    return cluster, words


def _say_work(model: str, gradient: str, work: scaling.Work) -> str:
    parts = (work.forward_s, work.backward_s, work.optimizer_s)
    named = zip(("forward", "backward", "update"), parts, strict=True)
    words = ", ".join(
        f"{name} {scaling.format_seconds(seconds)}" for name, seconds in named if seconds
    )
    return f"{model}, gradients {gradient}: {scaling.say_bytes(work.gradient_bytes)}; {words}"


def _answer(job: _Job, wish: "PlanRequest") -> _Answer:
    last, per_node = wish.num_nodes, wish.per_node
    counts = range(1, last + 1) if last <= 8 else (1 << power for power in range(17))
    shown = sorted({*(count for count in counts if count < last), last})
    return _Answer(
        predictions=[scaling.predict(job.work, job.cluster, count) for count in shown],
        places=scaling.layouts(job.work, job.cluster, per_node) if per_node > 1 else [],
        changes=scaling.suggest(job.work, job.cluster, last, SIZES[job.gradient]),
    )


def _print(job: _Job, answer: _Answer) -> None:
    predictions = answer.predictions
    blocks = ["\n".join(job.facts) + "\n", prediction_table(predictions)]
    blocks.append(prediction_bars(predictions))
    if sentences := layout_sentences(answer.places):
        blocks.append("\n".join(sentences) + "\n")
    lines = change_lines(answer.changes, predictions[-1].num_nodes)
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


def _write_svg(path: str, predictions: list[scaling.Prediction], title: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(render_svg(predictions, title))
    except OSError as error:
        raise UsageError(f"`{path}` can't be written", where="--svg", why=str(error)) from error


def _list_links() -> int:
    rows = [
        [option, name, scaling.say_link(known.link), known.about]
        for option, table in (("--network", scaling.BETWEEN), ("--inside", scaling.INSIDE))
        for name, known in table.items()
    ]
    click.echo(render_table(["OPTION", "NAME", "REACHES", "WHAT IT IS"], rows), nl=False)
    return 0


SIZES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
DEFAULT_NODES = 16
DEFAULT_SPLIT = "1:2"
_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([KMBGT]?)", re.IGNORECASE)
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_MAX_PARAMS = 1e14


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The checked command line; None for values that are to be measured."""

    num_params: float | None
    gradient: str | None
    step_s: float | None
    split: tuple[float, float, float]
    network: scaling.NetworkLink | None
    inside: scaling.NetworkLink | None
    engine: str | None
    num_nodes: int
    per_node: int
    adapters: int
    accumulation: int
    is_sharded: bool
    command: tuple[str, ...]


def read_plan_request(given: dict[str, Any]) -> PlanRequest:
    """Read and check the command line.

    Raises:
        ManyErrors: All errors in the command line.
    """
    found: list[UsageError] = []
    num_params = _read_params(given["params"], found)
    step_s = _read_time(given["step_time"], found)
    split = _read_split(given["split"] or DEFAULT_SPLIT, found)
    network = _read_link("--network", given["network"], found)
    inside = _read_link("--inside", given["inside"], found)
    _check_work(given, found)
    _check_network(given, found)
    if found:
        raise ManyErrors(found)
    return PlanRequest(
        num_params=num_params,
        gradient=given["dtype"],
        step_s=step_s,
        split=split,
        network=network,
        inside=inside,
        engine=given["engine"],
        num_nodes=given["nodes"] or DEFAULT_NODES,
        per_node=given["per_node"],
        adapters=given["adapters"],
        accumulation=given["accumulate"],
        is_sharded=given["fsdp"],
        command=given["command"],
    )


def _check_work(given: dict[str, Any], found: list[UsageError]) -> None:
    if given["script"]:
        doubled = [name for name in ("params", "step_time", "split") if given[name]]
        for name in doubled:
            option = f"--{name.replace('_', '-')}"
            found.append(UsageError(f"--script measures what {option} gives", where=option))
        if not given["command"]:
            fix = "muster plan --network 25GbE --script train.py ARGS"
            found.append(UsageError("--script needs a script after it", fix=fix))
        elif not os.path.isfile(given["command"][0]):
            what = f"there is no script `{given['command'][0]}`"
            found.append(UsageError(what, where="--script"))
        return
    if given["command"]:
        words = " ".join(given["command"])
        fix = f"to measure a script: muster plan ... --script {words}"
        found.append(UsageError(f"unexpected argument: `{words}`", fix=fix))
    missing = [
        option
        for option, name in (("--params", "params"), ("--step-time", "step_time"))
        if not given[name]
    ]
    if missing:
        what = f"the model is not known: {' and '.join(missing)} missing"
        fix = "--params 7e9 --step-time 470ms, or --script train.py ARGS"
        found.append(UsageError(what, fix=fix))


def _check_network(given: dict[str, Any], found: list[UsageError]) -> None:
    if given["engine"]:
        for option, name in (("--network", "network"), ("--inside", "inside")):
            if given[name]:
                what = f"--on measures what {option} gives"
                found.append(UsageError(what, where=option, fix="leave out one of them"))
        if (given["nodes"] or 0) < 2:
            what = "a network is measured between two nodes or more"
            found.append(UsageError(what, where="--nodes", fix=f"--on {given['engine']} --nodes 2"))
        return
    if not given["network"]:
        fix = "--network 25GbE (names: muster plan --list), or --on NAME --nodes 2 to measure it"
        found.append(UsageError("the network is not known", fix=fix))
    if given["per_node"] > 1 and not given["inside"]:
        what = f"what joins the {given['per_node']} GPUs of a node is not known"
        fix = "--inside nvlink4 (names: muster plan --list)"
        found.append(UsageError(what, where="--gpus-per-node", fix=fix))


def _read_params(text: str | None, found: list[UsageError]) -> float | None:
    if text is None:
        return None
    match = _COUNT.fullmatch(text.strip())
    count = float(match.group(1)) * _FACTORS[match.group(2).upper()] if match else 0.0
    if not 1 <= count <= _MAX_PARAMS:
        what = f"`{text}` is not a valid number of parameters"
        found.append(UsageError(what, where="--params", fix="--params 7e9, 7B or 350M"))
    return count


def _read_time(text: str | None, found: list[UsageError]) -> float | None:
    if text is None:
        return None
    seconds = parse_timeout(text)
    if not seconds:
        what = f"`{text}` is not a valid duration"
        found.append(UsageError(what, where="--step-time", fix="--step-time 470ms"))
    return seconds


def _read_split(text: str, found: list[UsageError]) -> tuple[float, float, float]:
    """Return the fractions of a step (forward, backward, optimizer), which sum to 1."""
    words = text.split(":")
    try:
        parts = [float(word) for word in words]
    except ValueError:
        parts = []
    sums = 0 < sum(parts) < float("inf") and min(parts) >= 0
    if len(parts) not in (2, 3) or not sums or parts[1] == 0:
        what = f"`{text}` does not split a step"
        why = "it takes forward:backward or forward:backward:optimizer, and a backward pass"
        found.append(UsageError(what, where="--split", why=why, fix="--split 1:2:0.1"))
        return (0.0, 1.0, 0.0)
    whole = sum(parts)
    forward, backward, *rest = (part / whole for part in parts)
    return forward, backward, rest[0] if rest else 0.0


def _read_link(
    option: str, text: str | None, found: list[UsageError]
) -> scaling.NetworkLink | None:
    if text is None:
        return None
    known = scaling.BETWEEN if option == "--network" else scaling.INSIDE
    names = {name.lower(): name for name in known}
    if text.lower() in names:
        return known[names[text.lower()]].link
    link = scaling.parse_link(text)
    if link is None:
        from torchmuster.core.model.text import nearest

        near = nearest(text.lower(), names)
        fix = f"did you mean `{names[near]}`?" if near else f"{option} 25Gbit/s,50us"
        why = "it is neither RATE,LATENCY nor a name of `muster plan --list`"
        found.append(UsageError(f"`{text}` is not a known link", where=option, why=why, fix=fix))
    return link


BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"
_COMPUTES, _WAITS = "#4c78a8", "#e45756"


def prediction_table(predictions: Sequence[scaling.Prediction]) -> str:
    """Return the predictions as a table; times are for one step."""
    header = ["NODES", "WORKERS", "STEP", "ALL-REDUCE", "WAITING", "EFFICIENCY", "AS FAST AS"]
    rows = [
        [
            str(one.num_nodes),
            str(one.num_workers),
            scaling.format_seconds(one.step_s),
            scaling.format_seconds(one.communication_s) if one.num_workers > 1 else "-",
            scaling.format_seconds(waits_s(one)) if one.num_workers > 1 else "-",
            f"{one.efficiency:.0%}",
            f"{one.speed_up:.3g} workers" if one.speed_up != 1 else "1 worker",
        ]
        for one in predictions
    ]
    return render_table(header, rows)


def waits_s(prediction: scaling.Prediction) -> float:
    """Return the time that a step takes in addition to that of a single worker."""
    return prediction.exposed_s + prediction.cost_s + prediction.skew_s


def prediction_bars(predictions: Sequence[scaling.Prediction]) -> str:
    """Return one bar for each prediction: computing is solid, waiting is shaded."""
    longest = max(one.step_s for one in predictions)
    width = max(len(str(one.num_nodes)) for one in predictions)
    lines = []
    for one in predictions:
        whole = one.step_s / longest * BAR
        computing = _full(whole * one.efficiency)
        waiting = "░" * max(0, round(whole) - len(computing))
        lines.append(
            f"{one.num_nodes:>{width}} {(computing + waiting):<{BAR}} {one.efficiency:.0%}"
        )
    legend = f"{'':>{width}} █ computes  ░ waits; the longest bar is {scaling.format_seconds(longest)} a step"
    return "\n".join([*lines, legend]) + "\n"


def _full(length: float) -> str:
    part = int(length % 1 * 8)
    return "█" * int(length) + (_EIGHTHS[part] if part else "")


def layout_sentences(found: Sequence[scaling.Layout]) -> list[str]:
    """Return a comparison of the same workers on few nodes and on many."""
    if len(found) < 2:
        return []
    lines = [
        f"  {_nodes(one.num_nodes)} with {one.per_node}: {scaling.format_seconds(one.prediction.step_s)} a step, "
        f"efficiency {one.prediction.efficiency:.0%}"
        for one in found
    ]
    few, many = found[0], found[-1]
    times = many.prediction.step_s / few.prediction.step_s
    if times >= 1.02:
        verdict = (
            f"{_nodes(few.num_nodes)} is {times:.3g} times as fast as {_nodes(many.num_nodes)}"
        )
    elif times <= 0.98:
        verdict = (
            f"{_nodes(many.num_nodes)} are {1 / times:.3g} times as fast as {_nodes(few.num_nodes)}"
        )
    else:
        verdict = "no difference: the all-reduces overlap with the backward pass either way"
    workers = few.per_node * few.num_nodes
    return [f"the same {workers} workers: {verdict}", *lines]


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def change_lines(changes: Sequence[scaling.JobChange], num_nodes: int) -> list[str]:
    """Return the changes that would help, the best first."""
    if not changes:
        return [f"on {_nodes(num_nodes)} no change would bring more than 2 %"]
    lines = [f"what would help most on {_nodes(num_nodes)}:"]
    for change in changes:
        note = f" ({change.note})" if change.note else ""
        step = f"{scaling.format_seconds(change.step_s)} a step"
        lines.append(f"  {change.gain:.2f} times the work: {change.what}, {step}{note}")
    return lines


def render_svg(predictions: Sequence[scaling.Prediction], title: str) -> str:
    """Return the bars as an SVG image."""
    from xml.sax.saxutils import escape  # brings urllib's client along

    row, left, width = 28, 90, 460
    longest = max(one.step_s for one in predictions)
    height = 56 + row * len(predictions) + 30
    size = f'width="{left + width + 170}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="24" font-size="15">{escape(title)}</text>',
    ]
    for number, one in enumerate(predictions):
        y = 44 + row * number
        computes = width * one.efficiency * one.step_s / longest
        waits = width * (1 - one.efficiency) * one.step_s / longest
        end = left + computes + waits + 8
        parts += [
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{_nodes(one.num_nodes)}</text>',
            f'<rect x="{left}" y="{y}" width="{computes:.1f}" height="20" fill="{_COMPUTES}"/>',
            f'<rect x="{left + computes:.1f}" y="{y}" width="{waits:.1f}" height="20" fill="{_WAITS}"/>',
            f'<text x="{end:.1f}" y="{y + 15}">{scaling.format_seconds(one.step_s)}, {one.efficiency:.0%}</text>',
        ]
    y = 44 + row * len(predictions) + 20
    parts += [
        f'<text x="{left}" y="{y}" fill="{_COMPUTES}">computes</text>',
        f'<text x="{left + 80}" y="{y}" fill="{_WAITS}">waits for the all-reduce</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
