"""Call the head of a run, or of a group of a workflow, as a client."""

from torchmuster.errors import ChannelError
from torchmuster.files import atomic
from torchmuster.net.channel import Channel, connect
from torchmuster.net.handshake import HandshakeError, Role
from torchmuster.net.race import RaceError, race, worst_failure
from torchmuster.net.secret import read_secret
from torchmuster.owner.views.find import RunView


async def call_head(view: RunView, group: str | None = None) -> Channel:
    """Return a connection to the head, by any of its addresses.

    Raises:
        ChannelError: It can't be reached.
    """
    path = view.run_dir.head if group is None else view.run_dir.group(group).head
    whose = f"the run {view.run_id}" if group is None else f"the group {group}"
    where = atomic.read_json(path)
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
        raise ChannelError(
            f"the head of {whose} can't be reached from here",
            where=f"{host}:{port}",
            why=why,
            fix=f"on {node}: the same command" if node else f"muster status {view.run_id}",
        ) from error
    return channel
