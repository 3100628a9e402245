"""`torchmuster.launch(function, inline=True)`: rank 0 of 1 in this very process, for a debugger or a test."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.states import RunState
from torchmuster.core.node.options import world_of_one
from torchmuster.errors import NotFoundError
from torchmuster.launcher.api import call, keywords
from torchmuster.launcher.api.failures import NotLaunchedError
from torchmuster.launcher.api.run import RunHandle, RunStatus

# What is the same in one process, or changes only names and retries.
_MEANT = frozenset({"inline", "name", "env", "max_restarts"})


class InlineRun(RunHandle):
    """A call that has returned: it has no folder, no log and no other process."""

    def __init__(self, value: Any) -> None:
        super().__init__(RunDir("inline"))
        self._value = value

    def __repr__(self) -> str:
        return "<torchmuster.Run inline: succeeded>"

    def status(self) -> RunStatus:
        """Return the state of a run that has succeeded."""
        return RunStatus(
            run_id=self.run_id,
            state=RunState.SUCCEEDED.value,
            is_final=True,
            num_attempts=1,
            elapsed_s=None,
            waits_for="",
            exit_code=0,
        )

    def logs(self, rank: int = 0, *, attempt: int | None = None) -> str:
        """Refuse: it has printed on this process's own output.

        Raises:
            NotFoundError: Always.
        """
        raise NotFoundError("a call in this process has no log: it has printed here")

    def wait(self, timeout_s: float | None = None) -> RunHandle:
        """Return the run."""
        return self

    async def wait_async(self, timeout_s: float | None = None) -> RunHandle:
        """Return the run."""
        return self

    def follow(self) -> RunHandle:
        """Return the run."""
        return self

    def cancel(self, *, at_once: bool = False, timeout_s: float = 60.0) -> None:
        """Do nothing: it has ended."""

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """Return what the function has returned."""
        return [self._value]

    async def results_async(self, timeout_s: float | None = None) -> list[Any]:
        """Return the same as `results`."""
        return [self._value]


def call_here(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> InlineRun:
    """Call a function as rank 0 of 1, with torchrun's variables; what it raises is not caught.

    Raises:
        NotLaunchedError: It is a script, or an option needs more than this process.
    """
    if not callable(function):
        fix = f"muster run --inline {function}"
        raise NotLaunchedError("launch(inline=True) calls a function, not a script", fix=fix)
    ours, theirs = keywords.split(options, function, args, call.name_of(function))
    one = {"nodes": ("1", 1), "nproc_per_node": ("1", 1)}
    more = [
        key for key, value in ours.items() if key not in _MEANT and value not in one.get(key, ())
    ]
    if more:
        first, *others = [
            NotLaunchedError(
                "this process calls the function itself, as rank 0 of 1",
                where=f"launch({key}=...)",
                fix="without it, or without inline=True",
            )
            for key in more
        ]
        first.others = tuple(others)
        raise first
    with _set(world_of_one() | keywords.environment(ours)):
        return InlineRun(function(*args, **theirs))


@contextlib.contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
