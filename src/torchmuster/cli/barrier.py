"""`muster barrier`: wait for all tasks of the group, or, without a workflow, for all ranks."""

import hmac
import os
import time
from typing import Any

import click


@click.command()
@click.option("--name", default="default", metavar="NAME", help="Name of the barrier.")
@click.option("--count", metavar="N", help="Number of callers to wait for; default each task once.")
@click.option("--rank", metavar="R", help="This caller's number, from 0.")
@click.option("--timeout", default="10m", metavar="TIME", help="Limit of the wait; default 10m.")
@click.option(
    "--num-nodes", "--num_nodes", "num_nodes", metavar="N", help="Number of ranks, with --connect."
)
@click.option("--connect", metavar="HOST", help="Host of rank 0; needed outside of a workflow.")
@click.option("--port", metavar="PORT", help="Port of rank 0; default 12344.")
@click.option(
    "--secret-file",
    metavar="FILE",
    help="Key that all ranks share; default the file `key` in MUSTER_HOME.",
)
def barrier(**given: Any) -> int:
    """Wait until all callers have reached the same barrier.

    \b
    muster barrier                     in a task: wait for all tasks of its group
    muster barrier --name data         another one
    muster barrier --num-nodes 2 --rank 1 --connect HOST      without a workflow

    Exits with 0 when all have reached it, 6 at the time limit, 12 if it can't be passed.
    """  # noqa: D301 - \b is click's mark
    from torchmuster.net.task_call import agent_socket, wait_at_barrier

    numbers = _read(given)
    begun_s = time.monotonic()
    if agent_socket() is not None:
        _note_unused(given)
        count = numbers["count"] if numbers["count"] is not None else numbers["num_nodes"]
        wait_at_barrier(
            given["name"], count=count, rank=numbers["rank"], timeout_s=numbers["timeout"], say=_say
        )
    elif numbers["num_nodes"] is not None:
        _wait_alone(given, numbers)
    else:
        raise _outside()
    click.echo(
        f"barrier `{given['name']}`: all have reached it after {time.monotonic() - begun_s:.1f} s"
    )
    return 0


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers among the options; all mistakes are told at once."""
    from torchmuster.net.task_call import agent_socket
    from torchmuster.spec.problems import Problems
    from torchmuster.spec.units import parse_timeout

    problems = Problems()
    numbers: dict[str, Any] = {
        "count": _number(given, "count", 1, 1 << 16, problems),
        "num_nodes": _number(given, "num_nodes", 1, 1 << 16, problems),
        "rank": _number(given, "rank", 0, (1 << 16) - 1, problems),
        "port": _number(given, "port", 1, 65535, problems),
        "timeout": parse_timeout(given["timeout"]),
    }
    if not numbers["timeout"]:
        where, fix = f"--timeout {given['timeout']}", "--timeout 10m"
        problems.add("the limit is not a time above 0", where, fix=fix)
    counts = {numbers["count"], numbers["num_nodes"]} - {None}
    if len(counts) > 1:
        problems.add("--count and --num-nodes are the same thing, and differ")
    if agent_socket() is None and given["num_nodes"] is not None:
        _check_alone(given, numbers, problems)
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


def _check_alone(given: dict[str, Any], numbers: dict[str, Any], problems: Any) -> None:
    num_nodes, rank = numbers["num_nodes"], numbers["rank"]
    if given["rank"] is None and num_nodes != 1:
        problems.add("outside of a workflow each caller needs its rank", fix="--rank 0")
    if rank is not None and num_nodes is not None and rank >= num_nodes:
        fix = f"ranks are 0 to {num_nodes - 1}"
        problems.add(
            f"rank {rank} is out of range for {num_nodes} nodes", f"--rank {rank}", fix=fix
        )
    if rank and not given["connect"]:
        what = f"rank {rank} has to know where rank 0 is"
        problems.add(what, fix="--connect HOST")


def _wait_alone(given: dict[str, Any], numbers: dict[str, Any]) -> None:
    if numbers["num_nodes"] == 1:
        return
    from torchmuster.net.lone_barrier import DEFAULT_PORT, LoneBarrier, wait_at_lone_barrier

    wait = LoneBarrier(
        num_nodes=numbers["num_nodes"],
        rank=numbers["rank"],
        key=_key(given["secret_file"]),
        host=(given["connect"] or "").strip("[]"),
        port=numbers["port"] or DEFAULT_PORT,
        name=given["name"],
        timeout_s=numbers["timeout"],
    )
    wait_at_lone_barrier(wait, lambda line: _say(f"barrier `{given['name']}`: {line}"))


def _key(secret_file: str | None) -> bytes:
    """Return the key of this use; the first caller of a user makes the file in MUSTER_HOME."""
    from torchmuster.errors import RunDirectoryError
    from torchmuster.files.layout import muster_home
    from torchmuster.net.secret import new_secret, read_secret, write_secret

    path = secret_file or os.path.join(muster_home(), "key")
    if secret_file is None:
        try:
            os.makedirs(muster_home(), mode=0o700, exist_ok=True)
            write_secret(path, new_secret())
        except FileExistsError:
            pass
        except OSError as error:
            raise RunDirectoryError(
                "the key can't be made", where=path, why=error.strerror, fix="--secret-file FILE"
            ) from error
    return hmac.digest(read_secret(path), b"barrier", "sha256")


def _note_unused(given: dict[str, Any]) -> None:
    unused = [f"--{name}" for name in ("connect", "port") if given[name] is not None]
    unused += ["--secret-file"] if given["secret_file"] is not None else []
    if unused:
        _say(f"note: in a task of a workflow its agent is asked, {' and '.join(unused)} not used")


def _outside() -> Exception:
    from torchmuster.errors import UsageError

    return UsageError(
        "this process is not part of a workflow's task, so it has no group to wait for",
        fix="start it by `muster submit`; elsewhere `muster barrier --num-nodes N --rank R --connect"
        " HOST`, or torch.distributed.barrier() in a training script",
    )


def _say(line: str) -> None:
    click.echo(line, err=True)
