"""`muster barrier`: wait for all tasks of the group."""

import time
from typing import Any

import click


@click.command()
@click.option("--name", default="default", metavar="NAME", help="Name of the barrier.")
@click.option("--count", metavar="N", help="Number of callers to wait for; default each task once.")
@click.option("--rank", metavar="R", help="This caller's number, from 0.")
@click.option("--timeout", default="10m", metavar="TIME", help="Limit of the wait; default 10m.")
@click.option("--num-nodes", "--num_nodes", "num_nodes", metavar="N", help="The same as --count.")
# Accepted for command lines written for `osmo_barrier.py`, but unused: the agent knows its head.
@click.option("--connect", hidden=True)
@click.option("--port", hidden=True)
@click.option("--secret-file", hidden=True)
def barrier(**given: Any) -> int:
    """Wait until all callers have reached the same barrier.

    \b
    muster barrier                     in a task: wait for all tasks of its group
    muster barrier --name data         another one

    Exits with 0 when all have reached it, 6 at the time limit, 12 if it can't be passed.
    """  # noqa: D301 - \b is click's mark
    from torchmuster.workflow.task_call import check_in_task, wait_at_barrier

    check_in_task()
    numbers = _read(given)
    begun_s = time.monotonic()
    _note_unused(given)
    count = numbers["count"] if numbers["count"] is not None else numbers["num_nodes"]
    wait_at_barrier(
        given["name"], count=count, rank=numbers["rank"], timeout_s=numbers["timeout"], say=_say
    )
    click.echo(
        f"barrier `{given['name']}`: all have reached it after {time.monotonic() - begun_s:.1f} s"
    )
    return 0


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Parse the numbers among the options; report all problems at once."""
    from torchmuster.core.spec.problems import Problems, parse_timeout

    problems = Problems()
    numbers: dict[str, Any] = {
        "count": _number(given, "count", 1, 1 << 16, problems),
        "num_nodes": _number(given, "num_nodes", 1, 1 << 16, problems),
        "rank": _number(given, "rank", 0, (1 << 16) - 1, problems),
        "timeout": parse_timeout(given["timeout"]),
    }
    if not numbers["timeout"]:
        where, fix = f"--timeout {given['timeout']}", "--timeout 10m"
        problems.add("the limit is not a time above 0", where, fix=fix)
    counts = {numbers["count"], numbers["num_nodes"]} - {None}
    if len(counts) > 1:
        problems.add("--count and --num-nodes are the same thing, and differ")
    return problems.checked(numbers)


def _number(given: dict[str, Any], name: str, low: int, high: int, problems: Any) -> int | None:
    text = given[name]
    if text is None:
        return None
    option = f"--{name.replace('_', '-')}"
    if text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high:
        return int(text)
    problems.add(f"`{text}` is not a number from {low} to {high}", f"{option} {text}")
    return None


def _note_unused(given: dict[str, Any]) -> None:
    others = ("connect", "port", "secret_file")
    unused = [f"--{name.replace('_', '-')}" for name in others if given[name] is not None]
    if unused:
        _say(f"note: in a task of a workflow its agent is asked, {' and '.join(unused)} not used")


def _say(line: str) -> None:
    click.echo(line, err=True)
