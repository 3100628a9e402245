"""Format numbers and times for the page and the comparison."""

import math
from datetime import UTC, datetime


def span(seconds: float | None) -> str:
    """Return a duration as `85 ms`, `4.2 s`, `3 min 20 s`, `1 h 02 min`, `2 d 3 h`; or `-`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24} h"


def node_time(seconds: float, what: str = "node") -> str:
    """Return node seconds as `3.21 node hours`, or below 0.1 hours as `48 node seconds`."""
    return (
        f"{seconds / 3600:.2f} {what} hours" if seconds >= 360 else f"{seconds:.3g} {what} seconds"
    )


def clock(at: float | None) -> str:
    """Return a time in UTC, to the second; `-` if it is not known."""
    if at is None:
        return "-"
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "-"


def figure(value: float | None) -> str:
    """Return a number with four significant digits; `-` if it is not known."""
    if value is None:
        return "-"
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3e}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def percent(share: float | None, digits: int = 0) -> str:
    """Return a share as `92 %`; `-` if it is not known."""
    return "-" if share is None else f"{share * 100:.{digits}f} %"
