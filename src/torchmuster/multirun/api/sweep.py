"""`torchmuster.sweep`: the command `muster sweep` for a function or script, with Python values."""

import ast
import asyncio
import contextlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.core.files.layout import Kind, RunDir, short_id
from torchmuster.core.model.states import RunState
from torchmuster.core.spec.launch import LaunchOrder
from torchmuster.errors import NotFoundError
from torchmuster.launcher.api.failures import NotLaunchedError, RunFailed
from torchmuster.launcher.api.launch import start_command, start_order
from torchmuster.launcher.api.run import RunHandle, copied_run, interrupt_cancels, poll_until_ended
from torchmuster.launcher.views.elsewhere import elsewhere, is_elsewhere
from torchmuster.launcher.views.find import any_result, find_run, owner_lives, view_run
from torchmuster.multirun.sweep.members import member_dir
from torchmuster.multirun.sweep.plan import MAX_MEMBERS
from torchmuster.multirun.views.sweep_view import MemberView, SweepView, view_of_sweep

# The handle of a sweep reads its directory with the code of `muster status`, `wait` and `cancel`.


_FOLLOW_POLL_S = 1.0
_POLL_S = 0.05
_POLL_JOBS_S = 1.0  # for an array, each poll reads the folders of all members


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepMember:
    """The state of one member of a sweep.

    Attributes:
        number: Its number, from 0.
        state: `waiting`, `running`, `succeeded`, `failed`, `stopped` (early, by the rule), ...
        values: Its values by name: numbers, True, False and None as such, all else as text.
        value: The last value of the metric; None without one.
        step: The step of that value; for a printed one, the number of lines with a value so far.
        attempt: The newest attempt, from 0; None before the first.
        elapsed_s: How long it ran, in seconds; None until it has ended.
        why: The reason for its state in one sentence, such as the error; None if there is none.
    """

    number: int
    state: str
    values: dict[str, Any]
    value: float | None
    step: int | None
    attempt: int | None
    elapsed_s: float | None
    why: str | None


class SweepHandle:
    """One sweep, started by `sweep`, by another process, or from the command line.

    The handle has no state: two handles of one sweep show the same, in any process of this user.

    Attributes:
        run_id: Its id, which every command accepts.
        path: Its run directory.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_id = os.path.basename(run_dir.path)
        self.path = run_dir.path
        self._dir = run_dir

    def __repr__(self) -> str:
        """Return the id, and the number of members in each state."""
        from torchmuster.multirun.cli.sweep_record import counted

        return f"<torchmuster.SweepHandle {short_id(self.run_id)}: {counted(self._view())}>"

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same sweep."""
        return isinstance(other, SweepHandle) and other.path == self.path

    def __hash__(self) -> int:
        """Return the hash of its path."""
        return hash(self.path)

    # State.

    def state(self) -> str:
        """Return the state of the sweep: `starting`, `running`, `succeeded`, `failed`, ..."""
        return view_run(self._dir).state.value

    def members(self) -> list[SweepMember]:
        """Return the state of every member, by number.

        For job arrays this asks the scheduler, for pods the cluster.
        """
        view = self._view()
        return [_member(view, member) for member in view.members]

    def table(self) -> str:
        """Return a table of the members as text: values, states, the metric, and errors."""
        from torchmuster.multirun.cli.sweep_record import members_table

        return members_table(self._view())

    def best(self) -> SweepMember | None:
        """Return the member with the best last metric value so far; None while there is none.

        Raises:
            torchmuster.errors.NotFoundError: A member has succeeded, but none reported the metric.
        """
        from torchmuster.multirun.cli.sweep_record import describe_missing_metric

        view = self._view()
        if (missing := describe_missing_metric(view, self._dir)) is not None:
            raise NotFoundError(missing, where=self.path)
        return _member(view, view.best) if view.best is not None else None

    def run(self, number: int) -> RunHandle:
        """Return the run of a member, with its logs, status and results.

        Raises:
            torchmuster.errors.NotFoundError: The sweep has no such member, or it has not begun.
        """
        plan = self._view().plan
        if not 0 <= number < len(plan.members):
            what = f"the sweep {short_id(self.run_id)} has no member {number}"
            raise NotFoundError(what, why=f"its members are 0 to {len(plan.members) - 1}")
        folder = member_dir(self._dir, plan, number)
        if not os.path.isdir(folder.path):
            raise NotFoundError(f"member {number} has not begun", where=self.path)
        return RunHandle(folder)

    # End.

    def wait(self, timeout_s: float | None = None) -> "SweepHandle":
        """Wait until all members have succeeded or were stopped by the rule; return the sweep.

        Args:
            timeout_s: How long to wait; None: without limit. The sweep continues after a timeout.

        Raises:
            RunFailed: A member failed, was preempted or was lost, or the sweep was cancelled.
            TimeoutError: The sweep has not ended within `timeout_s`.
        """
        with copied_run(self._dir):
            for pause_s in self._look_until_ended(timeout_s):
                threading.Event().wait(pause_s)
        return self

    async def wait_async(self, timeout_s: float | None = None) -> "SweepHandle":
        """Wait as `wait` does, without blocking the event loop: `await sweep.wait_async()`."""
        with copied_run(self._dir):
            for pause_s in self._look_until_ended(timeout_s):
                await asyncio.sleep(pause_s)
        return self

    def results(self, timeout_s: float | None = None, *, partial: bool = False) -> list[Any]:
        """Wait until the sweep has ended; return the function's result in every member, by number.

        For a member with several workers the result is a list, by rank. A member that the rule has
        stopped early has None.

        Args:
            timeout_s: As for `wait`.
            partial: Return None for members that failed, too, instead of raising.

        Raises:
            RunFailed: Not all members have succeeded, unless `partial`.
            TimeoutError: The sweep has not ended within `timeout_s`.
            ResultError: A value is missing, damaged or from another Python.
            torchmuster.errors.NotFoundError: The sweep runs a script, not a function.
        """
        with contextlib.suppress(*((RunFailed,) if partial else ())):
            self.wait(timeout_s)
        view = self._view()
        return [self._value(view, member) for member in view.members]

    def follow(self) -> "SweepHandle":
        """Show the members' states and the best so far until the sweep ends, then the table.

        In a notebook the cell shows them. An interrupt (Ctrl-C, the button of a notebook) cancels
        the sweep. Return the sweep.

        Raises:
            RunFailed: As for `wait`.
            KeyboardInterrupt: The wait was interrupted, and the sweep has been cancelled.
        """
        with interrupt_cancels(self.run_id, self.cancel), copied_run(self._dir):
            follow_sweep(self._dir)
        return self.wait()

    def restart(self) -> "SweepHandle":
        """Restart the sweep: run all members that have not succeeded; return at once.

        These are the members that failed, were preempted, cancelled or lost, or have not begun.

        Raises:
            NotLaunchedError: All members have succeeded.
        """
        start_command("restart", ["--detach", self.run_id])
        return self

    def cancel(self, *, at_once: bool = False, timeout_s: float = 60.0) -> None:
        """Stop all members and wait for their end; do nothing if the sweep has ended.

        Args:
            at_once: Give members no time to save (`grace`).
            timeout_s: How long to wait for the end, in seconds.

        Raises:
            TimeoutError: The sweep has not ended within `timeout_s`, although it was asked to.
        """
        RunHandle(self._dir).cancel(at_once=at_once, timeout_s=timeout_s)

    # Views.

    def _view(self) -> SweepView:
        if is_elsewhere(self._dir):
            elsewhere().catch_up(self._dir)
        return view_of_sweep(self._dir)

    def _look_until_ended(self, timeout_s: float | None) -> Iterator[float]:
        """Yield how long to wait before the next poll, until the sweep has succeeded."""
        pause_s = _POLL_JOBS_S if os.path.exists(self._dir.arrays) else _POLL_S
        result = yield from poll_until_ended(self._dir, timeout_s, lambda _: pause_s)
        state = result.state if result is not None else RunState.LOST
        if state is not RunState.SUCCEEDED:
            raise RunFailed(short_id(self.run_id), result, state.value)

    def _value(self, view: SweepView, member: MemberView) -> Any:
        if member.state is not RunState.SUCCEEDED:
            return None
        found = RunHandle(member_dir(self._dir, view.plan, member.number)).results()
        return found[0] if view.plan.is_of_single_workers else found


def _member(view: SweepView, member: MemberView) -> SweepMember:
    given = view.plan.values_of(member.number)
    return SweepMember(
        number=member.number,
        state=member.state.value,
        values={name: _plain(text) for name, text in given.items()},
        value=member.value,
        step=member.step,
        attempt=member.attempt,
        elapsed_s=member.elapsed_s,
        why=member.why,
    )


def _plain(text: str) -> Any:
    """Return a number, True, False or None from its text, otherwise the text."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return found if isinstance(found, int | float | bool | None) else text


_MOST_CHARS = 60
Values = Mapping[str, Iterable[Any]]


def sweep(
    function: Callable[..., Any] | str | os.PathLike[str],
    values: Values,
    /,
    *args: Any,
    **options: Any,
) -> SweepHandle:
    """Call a function, or run a script, with every combination of values; return at once.

    Every long option of `muster sweep` is a keyword: `slots`, `per_gpu`, `metric`, `goal`, `stop`,
    `on`, `nproc_per_node`, `name`, `env`, `time` and so on (docs/cli.md). All other keywords go to
    the function.

    A function gets its member's values as keyword arguments, unchanged; a script gets them as
    options, as with `muster sweep`. With `metric`, the number that a function returns, or the entry
    of this name in a returned mapping, counts as its last printed value.

    Args:
        function: The function that every worker of every member calls, or the path of a script
            (with `module=True`, the name of a module).
        values: The values to try, by name: `{"lr": [1e-3, 1e-4], "seed": range(3)}` makes 6
            members; the last name varies fastest.
        args: The arguments for the function; a script gets them as text.
        options: The options of `muster sweep`, and the function's own keyword arguments. `zip` is
            a mapping of values that vary together, one row per member, combined with each
            combination of `values`.

    Returns:
        The sweep. It continues when this process ends.

    Raises:
        NotLaunchedError: A keyword, a value or the function can't be used. Nothing was started.
    """
    members = _members(values, options.pop("zip", None) or {})
    return SweepHandle(
        start_order(
            lambda words: start_command("sweep", ["--detach", *words]),
            function,
            args,
            options,
            LaunchOrder(names=tuple(members[0]), members=_as_texts(members)),
            of="sweep",
            members=members,
        )
    )


def find_sweep(word: str) -> SweepHandle:
    """Return a sweep by its id, an unambiguous part of it, or `last`, as for every command.

    Raises:
        torchmuster.errors.NotFoundError: There is none, there are several, or it is not a sweep.
    """
    view = find_run(word)
    if view.kind is not Kind.SWEEP:
        raise NotFoundError(f"{view.run_id} is no sweep", fix="torchmuster.find_run finds runs")
    return SweepHandle(view.run_dir)


# The values.


def _members(values: Values, rows: Values) -> list[dict[str, Any]]:
    """Return the values of each member by name.

    Raises:
        NotLaunchedError: There are no values, too many, or they don't match.
    """
    axes, zipped = _lists(values, "values"), _lists(rows, "zip")
    if twice := [name for name in axes if name in zipped]:
        raise NotLaunchedError(f"`{twice[0]}` varies in `values` and in `zip`", where="zip=")
    if not axes and not zipped:
        fix = 'sweep(train, {"lr": [1e-3, 1e-4], "seed": range(3)})'
        raise NotLaunchedError("a sweep needs values to try", fix=fix)
    lengths = {name: len(column) for name, column in zipped.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise NotLaunchedError(
            "the values of `zip` are of different number", where="zip=", why=counts
        )
    total = math.prod(map(len, axes.values())) * next(iter(lengths.values()), 1)
    if total > MAX_MEMBERS:
        counts = ", ".join(f"{name} {len(column):,}" for name, column in {**axes, **zipped}.items())
        what = f"a sweep has at most {MAX_MEMBERS:,} members, these values make {total:,}"
        raise NotLaunchedError(what, why=f"values: {counts}", fix="fewer values, or several sweeps")
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


def follow_sweep(run_dir: RunDir) -> None:
    """Show the states of a sweep's members until it has ended, then their table."""
    from torchmuster.launcher.api.follow import status_display
    from torchmuster.multirun.cli.sweep_record import counted, describe_best, members_table

    shown = status_display()
    best = ""
    try:
        while True:
            over = any_result(run_dir) is not None or not owner_lives(run_dir)
            view = view_of_sweep(run_dir)
            found = describe_best(view)
            if found is not None and found != best:
                best = found
                shown.write(f"best so far: {found}\n")
            shown.show(counted(view)[: shown.columns()])
            if over:
                break
            threading.Event().wait(_FOLLOW_POLL_S)
    finally:
        shown.show("")
    shown.write(members_table(view))
