"""Format numbers and times for the page and the comparison."""

from datetime import UTC, datetime


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
