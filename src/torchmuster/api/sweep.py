"""`torchmuster.sweep`: the command `muster sweep` for a function or a script, with values of Python."""

import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchmuster.api import call, keywords
from torchmuster.api.failures import NotLaunchedError
from torchmuster.api.program import start_command
from torchmuster.api.sweep_handle import SweepHandle
from torchmuster.errors import MusterError
from torchmuster.files import atomic
from torchmuster.files.layout import Kind, RunDir, runs_dir
from torchmuster.model import codec
from torchmuster.model.calls.call_file import LaunchOrder
from torchmuster.model.plan import FunctionCall
from torchmuster.spec.sweep_plan import MAX_MEMBERS

_MOST_CHARS = 60
Values = Mapping[str, Iterable[Any]]


def sweep(
    function: Callable[..., Any] | str | os.PathLike[str],
    values: Values,
    /,
    *args: Any,
    **options: Any,
) -> SweepHandle:
    """Call a function, or run a script, with every combination of values, some at a time; return at once.

    Every long option of `muster sweep` is a keyword, as those of `muster run` are keywords of `launch`: `slots`, `per_gpu`, `metric`,
    `goal`, `stop`, `on`, `nproc_per_node`, `name`, `env`, `time` and so on (docs/cli.md). All other keywords go to the function.

    A function gets the values of its member as keyword arguments, as they are; a script gets them as options, as under
    `muster sweep`. With `metric`, the number that a function returns counts, or the one of this name in a mapping that it returns, as
    the last that it prints.

    Args:
        function: What every worker of every member calls, or the path of a script (`module=True`: the name of a module).
        values: What varies, by name: `{"lr": [1e-3, 1e-4], "seed": range(3)}` makes 6 members; the last varies fastest.
        args: For the function; a script gets them as text.
        options: Of `muster sweep`, and the function's own keywords. `zip` is a mapping of what varies together: one row a member, combined
            with each combination of `values`.

    Returns:
        The sweep. It goes on when this process ends.

    Raises:
        NotLaunchedError: A keyword, a value or the function can't be used. Nothing was started.
    """
    folder = tempfile.mkdtemp(prefix="muster-sweep-")
    try:
        members = _members(values, options.pop("zip", None) or {})
        if callable(function):
            words, order = _of_function(function, members, args, options, folder)
        else:
            words, order = _of_script(os.fspath(function), args, options)
        order = replace(order, names=tuple(members[0]), members=_as_texts(members))
        path = os.path.join(folder, "order")
        atomic.replace_file(path, json.dumps(codec.to_plain(order)).encode(), mode=0o600)
        run_id = start_command("sweep", ["--detach", "--launched", path, *words])
        return SweepHandle(RunDir(os.path.join(runs_dir(), run_id)))
    except NotLaunchedError:
        raise
    except MusterError as error:
        raise NotLaunchedError(
            error.what, where=error.where, why=error.why, fix=error.fix
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_sweep(word: str) -> SweepHandle:
    """Return the sweep that a word names, as every command takes it: an id, an unambiguous part of one, or `last`.

    Raises:
        torchmuster.errors.NotFoundError: There is none, more than one, or it is no sweep.
    """
    from torchmuster.errors import NotFoundError
    from torchmuster.owner.views import find

    view = find.find_run(word)
    if view.kind is not Kind.SWEEP:
        raise NotFoundError(f"{view.run_id} is no sweep", fix="torchmuster.find_run finds runs")
    return SweepHandle(view.run_dir)


# What varies.


def _members(values: Values, rows: Values) -> list[dict[str, Any]]:
    """Return the values of each member by name.

    Raises:
        NotLaunchedError: There are none, too many, or they don't go together.
    """
    axes, zipped = _lists(values, "values"), _lists(rows, "zip")
    if twice := [name for name in axes if name in zipped]:
        raise NotLaunchedError(f"`{twice[0]}` varies in `values` and in `zip`", where="zip=")
    if not axes and not zipped:
        fix = 'sweep(train, {"lr": [1e-3, 1e-4], "seed": range(3)})'
        raise NotLaunchedError("a sweep needs values to try", fix=fix)
    lengths = {name: len(column) for name, column in zipped.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise NotLaunchedError(
            "the values of `zip` are of different number", where="zip=", why=told
        )
    total = math.prod(map(len, axes.values())) * next(iter(lengths.values()), 1)
    if total > MAX_MEMBERS:
        told = ", ".join(f"{name} {len(column):,}" for name, column in {**axes, **zipped}.items())
        what = f"a sweep has at most {MAX_MEMBERS:,} members, these values make {total:,}"
        raise NotLaunchedError(what, why=f"values: {told}", fix="fewer values, or several sweeps")
    num_rows = next(iter(lengths.values()), 1)
    together = [{name: column[row] for name, column in zipped.items()} for row in range(num_rows)]
    return [
        {**dict(zip(axes, combined, strict=True)), **row}
        for *combined, row in itertools.product(*axes.values(), together)
    ]


def _lists(values: Values, where: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    if not isinstance(values, Mapping):
        fix = '{"lr": [1e-3, 1e-4], "seed": range(3)}'
        what = f"what varies is a mapping of names to values, not a {type(values).__name__}"
        raise NotLaunchedError(what, where=where, fix=fix)
    for name, several in values.items():
        if isinstance(several, str | bytes) or not isinstance(several, Iterable):
            fix = f'{{"{name}": [{several!r}]}}'
            what = f"`{name}` is one value, not several"
            raise NotLaunchedError(what, where=f"{where}[{name!r}]", fix=fix)
        found[str(name)] = list(itertools.islice(several, MAX_MEMBERS + 1))
        if not found[str(name)]:
            raise NotLaunchedError(f"`{name}` has no values", where=f"{where}[{name!r}]")
    return found


def _as_texts(members: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """Return the values as texts, for tables, variables and scripts."""
    return tuple(tuple(_text(value) for value in member.values()) for member in members)


def _text(value: Any) -> str:
    if isinstance(value, str | int | float | bool | None):
        return str(value)
    name = getattr(value, "__name__", None)  # of a function or a class
    text = name if isinstance(name, str) else " ".join(repr(value).split())
    plain = "".join(c if c.isprintable() else "?" for c in text)
    return plain if len(plain) <= _MOST_CHARS else f"{plain[: _MOST_CHARS - 3]}..."


# What runs.


def _of_function(
    function: Callable[..., Any],
    members: Sequence[Mapping[str, Any]],
    args: Sequence[Any],
    options: Mapping[str, Any],
    folder: str,
) -> tuple[list[str], LaunchOrder]:
    name = call.name_of(function)
    ours, theirs = keywords.split(options, function, args, name, of="sweep", member=members[0])
    words, environment = keywords.words(ours, "sweep"), keywords.environment(ours, "sweep")
    packed = call.pack(function, args, theirs, os.getcwd(), members)
    path = os.path.join(folder, "call")
    atomic.replace_file(path, packed.data, mode=0o600)
    sent = FunctionCall(
        source=path,
        sha256=hashlib.sha256(packed.data).hexdigest(),
        module_file=packed.module_file,
    )
    if not {"name", "run_id"} & ours.keys():
        words += ["--name", call.run_name(packed.target)]
    return [*words, "--", packed.target], LaunchOrder(call=sent, environment=environment)


def _of_script(
    script: str, args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[str], LaunchOrder]:
    keywords.check(options, "a script", "sweep")
    words = [*keywords.words(options, "sweep"), "--", script]
    environment = keywords.environment(options, "sweep")
    return words, LaunchOrder(args=tuple(str(arg) for arg in args), environment=environment)
