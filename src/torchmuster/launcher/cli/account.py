"""Print the account of a run: where it ran, how long, how it ended."""

import time
from typing import TYPE_CHECKING

from torchmuster.core.model.text import in_one_line, span
from torchmuster.launcher.cli.echo import echo

if TYPE_CHECKING:
    from torchmuster.launcher.views.account import Account


def clock(seconds: float) -> str:
    """Format a time, in seconds since 1970, in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def print_account(account: "Account", *, has_job_line: bool = False) -> None:
    """Print where and how long it ran, and how it ended, even if the scheduler has forgotten it."""
    if account.jobs and not has_job_line:
        many = "s" if len(account.jobs) > 1 else " "
        echo(f"job{many}     {', '.join(account.jobs)} of {account.engine}")
    elif not account.jobs:
        echo(f"on       {account.engine}")
    duration = f", {span(account.elapsed_s)} since it began"
    if account.exit_code is not None:
        duration = f", took {span(account.elapsed_s)}"
    elif account.ended_by is not None:  # the end was not recorded
        duration = f", last heard of after {span(account.elapsed_s)}"
    lasted = duration if account.elapsed_s is not None else ""
    echo(f"time     submitted {clock(account.submitted)}{lasted}")
    if account.exit_code is not None:
        why = f": {in_one_line(account.ended_by)}" if account.ended_by else ""
        echo(f"exit     {account.exit_code}{why}")
    elif account.ended_by is not None:
        echo(f"end      {in_one_line(account.ended_by)}")
    for line in account.notifiers:
        echo(f"notify   {line}")
