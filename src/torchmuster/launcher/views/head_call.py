"""Call the head of a run, or of a workflow's group, as a client."""

import asyncio

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import short_id
from torchmuster.core.model.states import JobState
from torchmuster.core.net.address import read_secret
from torchmuster.core.net.channel import (
    Channel,
    HandshakeError,
    RaceError,
    Role,
    connect,
    race,
    worst_failure,
)
from torchmuster.errors import ChannelError
from torchmuster.launcher.views.elsewhere import elsewhere, is_elsewhere
from torchmuster.launcher.views.find import view_job
from torchmuster.launcher.views.run_view import RunView


async def call_head(view: RunView, group: str | None = None) -> Channel:
    """Connect to the head by any of its addresses.

    Raises:
        ChannelError: The head can't be reached.
    """
    folder = view.run_dir if group is None else view.run_dir.group(group)
    if is_elsewhere(folder) and (channel := await elsewhere().call_head(view, group)) is not None:
        return channel
    path = view.run_dir.head if group is None else view.run_dir.group(group).head
    whose = f"the run {view.run_id}" if group is None else f"the group {group}"
    where = atomic.read_json(path)
    if not isinstance(where, dict) and view.is_headless_member:
        what = (
            f"{view.run_id} is a single process of a sweep, which has no head that could be asked"
        )
        raise ChannelError(
            what, fix=f"muster stacks {short_id(view.run_id)}; muster logs {short_id(view.run_id)}"
        )
    if not isinstance(where, dict):
        raise ChannelError(f"{whose} has no head yet", where=path, fix="try again in a second")
    port = int(where["port"])
    hosts = [*map(str, where.get("addresses", ())), str(where["host"])]
    secret = read_secret(view.run_dir.secret)
    try:
        channel, _ = await race(
            [(host, port) for host in hosts],
            lambda host, port: connect(host, port, Role.CLIENT, secret),
        )
    except RaceError as lost:
        (host, _), error = worst_failure(lost, None)
        why, node = str(error) or "it does not answer", where.get("node")
        if isinstance(error, HandshakeError):
            why = f"something else answers there: {error}"
        job = await asyncio.to_thread(view_job, view.run_dir)
        if job is not None and job.state is JobState.SUSPENDED:
            what = f"job {job.job_id} is suspended: no process of it answers"
            fix = "once it goes on: the same command"
            raise ChannelError(what, where=node and f"on {node}", fix=fix) from error
        raise ChannelError(
            f"the head of {whose} can't be reached from here",
            where=f"{host}:{port}",
            why=why,
            fix=f"on {node}: the same command"
            if node
            else f"muster status {short_id(view.run_id)}",
        ) from error
    return channel
