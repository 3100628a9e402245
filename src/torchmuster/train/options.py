"""Options of `World.resume` that nothing can follow are refused before the first step."""

from numbers import Integral

from torchmuster.errors import UsageError


def check_options(when_busy: str, on_save_error: str, **counts: int | None) -> None:
    """Refuse options of `World.resume` that no save can follow.

    Raises:
        UsageError: A word is unknown, or a count is no whole number or below one.
    """
    if when_busy not in ("wait", "skip") or on_save_error not in ("raise", "warn"):
        raise UsageError(
            "when_busy is `wait` or `skip`, on_save_error `raise` or `warn`",
            where=f"when_busy={when_busy!r}, on_save_error={on_save_error!r}",
        )
    for name, value in counts.items():
        if value is None:
            continue
        is_number = isinstance(value, (Integral, float)) and not isinstance(value, bool)
        if not is_number or value % 1:  # numpy's numbers count, and 1e3 does
            raise UsageError(f"{name} is {value!r}, no whole number", where="World.resume")
        if value < 1:
            raise UsageError(f"{name} is {value}, below one", where="World.resume")
    copies = counts.get("memory_copies") or 1
    if copies > 1 and counts.get("memory_every_steps") is None:
        raise UsageError(
            f"memory_copies={copies} has no effect without memory_every_steps",
            where="World.resume",
            fix="memory_every_steps=1, or leave memory_copies out",
        )
