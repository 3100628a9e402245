"""Call the head of a run, or of a workflow's group, as a client; ask it for the state of its ranks.

Agents report every two seconds, so `BoardWatch` asks once a second, or less often where an answer
about many ranks costs the head more. A head that can't be reached is called again after five
seconds.
"""

import asyncio
import secrets
import threading
import time

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import short_id
from torchmuster.core.net.address import read_secret
from torchmuster.core.net.channel import (
    Channel,
    ChannelClosedError,
    HandshakeError,
    RaceError,
    Role,
    connect,
    race,
    worst_failure,
)
from torchmuster.errors import ChannelError, MusterError
from torchmuster.launcher.model.job import JobState
from torchmuster.launcher.model.progress import RankSample, join
from torchmuster.launcher.net import part_messages
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


# A thread that asks a head for the state of its ranks, so that no view waits for a network.


ASK_EVERY_S = 1.0
_RANKS_PER_S = 200  # a rank costs the head about 20 us
_SHARE = 0.2  # of this process's time for the answers about many ranks
_CALL_AGAIN_S = 5.0
_ANSWER_LIMIT_S = 10.0


class BoardWatch:
    """Keeps the newest sample of a run.

    Args:
        view: The run, which has or will have a head.
        ask_every_s: The shortest time between two questions.
    """

    def __init__(self, view: RunView, ask_every_s: float = ASK_EVERY_S) -> None:
        self._view, self._every_s = view, ask_every_s
        self._newest: tuple[RankSample | None, str] = (None, "")
        self._has_answer = threading.Event()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work, name="board", daemon=True)

    def start(self) -> None:
        """Start to ask."""
        self._thread.start()

    def close(self) -> None:
        """Stop asking; the thread ends by itself."""
        self._ends.set()

    def newest(self) -> tuple[RankSample | None, str]:
        """Return the last sample, or None and the reason why there is none; never waits."""
        return self._newest

    def wait(self, timeout_s: float) -> None:
        """Wait for the first answer, or the first reason why there is none."""
        self._has_answer.wait(timeout_s)

    def _work(self) -> None:
        while not self._ends.is_set():
            try:
                asyncio.run(self._ask())
            except MusterError as error:
                self._note(None, error.what)
            except (ChannelClosedError, TimeoutError, OSError, ValueError) as error:
                self._note(None, f"the head does not answer: {error or type(error).__name__}")
            self._ends.wait(_CALL_AGAIN_S)

    def _note(self, sample: RankSample | None, why: str) -> None:
        self._newest = (sample, why)
        self._has_answer.set()

    async def _ask(self) -> None:
        channel = await call_head(self._view)
        try:
            while not self._ends.is_set():
                began_at = time.monotonic()
                sample = await asyncio.wait_for(_ask_once(channel), _ANSWER_LIMIT_S)
                self._note(sample, "" if sample is not None else "its ranks have not reported yet")
                took_s = time.monotonic() - began_at
                num_ranks = len(sample.nodes) if sample is not None else 0
                every_s = max(self._every_s, took_s / _SHARE, num_ranks / _RANKS_PER_S)
                await asyncio.sleep(every_s)
        finally:
            await channel.close()


async def _ask_once(channel: Channel) -> RankSample | None:
    ask_id = secrets.token_hex(8)
    channel.send_nowait(part_messages.AskBoard(ask_id=ask_id))
    parts: list[RankSample] = []
    while True:
        answer = await channel.receive()
        if not isinstance(answer, part_messages.BoardSample) or answer.ask_id != ask_id:
            continue
        if answer.sample is None:
            return None
        parts.append(answer.sample)
        if answer.is_last:
            return join(parts)
