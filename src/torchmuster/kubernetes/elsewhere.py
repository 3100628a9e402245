"""Records in pods, for views and commands (`launcher/views/elsewhere.py`)."""

import asyncio
import atexit
import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model import codec
from torchmuster.errors import ChannelError
from torchmuster.launcher.views.elsewhere import (
    ClusterRecords,
    RecordCopy,
    RemoteFiles,
    RunFolder,
)

if TYPE_CHECKING:
    from torchmuster.core.net.channel import Channel
    from torchmuster.kubernetes.pods.reach import RunInPods
    from torchmuster.launcher.views.run_view import RunView


class RecordsInPods(ClusterRecords):
    """Records that are in pods, or on their volume."""

    def copied(self, run_dir: RunDir) -> "contextlib.AbstractContextManager[RecordCopy | None]":
        from torchmuster.kubernetes.pods.copy import copied

        return copied(run_dir)

    def follow(
        self, run_dir: RunDir, say: Callable[[str], None], show: Callable[[str], None]
    ) -> RecordCopy | None:
        from torchmuster.kubernetes.pods.copy import RunCopy

        return RunCopy.of(run_dir, say, show)

    def catch_up(self, run_dir: RunDir) -> None:
        from torchmuster.kubernetes.pods.elsewhere import catch_up_groups, is_elsewhere
        from torchmuster.kubernetes.pods.end import catch_up
        from torchmuster.kubernetes.pods.members import catch_up_members

        if os.path.isfile(run_dir.arrays):
            catch_up_members(run_dir)
        elif is_elsewhere(run_dir):
            catch_up_groups(run_dir)
        else:
            catch_up(run_dir)

    def find(self, word: str) -> RunDir | None:
        from torchmuster.kubernetes.pods.elsewhere import find_on_clusters

        return find_on_clusters(word)

    def fetch(self, run_dir: RunDir, say: Callable[[str], None]) -> None:
        from torchmuster.kubernetes.pods.copy import fetch

        fetch(run_dir, say)

    def words_on_reach(self, run_dir: RunDir) -> str | None:
        from torchmuster.kubernetes.pods.end import words_on_reach

        return words_on_reach(run_dir)

    def kept(self, run_dir: RunFolder) -> RemoteFiles | None:
        from torchmuster.kubernetes.node.order import ORDER_FILE, read_order

        path = os.path.join(run_dir.path, "pods", ORDER_FILE)
        with contextlib.suppress(codec.CodecError):
            if os.path.exists(path):
                order = read_order(path)
                return RemoteFiles(
                    home=order.home, path=order.run_dir.path, outlives=order.has_volume
                )
        return None

    async def call_head(self, view: "RunView", group: str | None) -> "Channel | None":
        from torchmuster.kubernetes.pods.reach import RunInPods

        run = RunInPods.of(view.run_dir, group)
        return await _call_in_pod(view, run) if run is not None else None

    def cancel_run(self, run_dir: RunDir) -> bool:
        from torchmuster.kubernetes.pods.end import cancel_run

        return cancel_run(run_dir)

    def cancel_groups(self, run_dir: RunDir) -> bool:
        from torchmuster.kubernetes.pods.elsewhere import cancel_groups

        return cancel_groups(run_dir)

    def remove_left(self, run_dir: RunDir) -> list[str]:
        from torchmuster.kubernetes.pods.end import remove_left

        return remove_left(run_dir)

    def first_section(self, which: Callable[[str], str | None]) -> tuple[str, str] | None:
        if which("kubectl") is None:
            return None
        from torchmuster.kubernetes.cli import first_section

        return "kubernetes", first_section()


async def _call_in_pod(view: "RunView", run: "RunInPods") -> "Channel":
    """Connect to the head through a port forward to the first pod; it closes with this process."""
    from torchmuster.core.net.address import read_secret
    from torchmuster.core.net.channel import HandshakeError, Role, connect
    from torchmuster.kubernetes.pods.reach import forward

    port = run.order.head_port
    pod = await asyncio.to_thread(run.first_pod)
    if pod is None or not pod.is_up:
        raise ChannelError(
            f"the first pod of {view.run_id} does not run",
            where=f"job {run.job_id}",
            fix=f"muster status {short_id(view.run_id)} tells what it waits for",
        )
    way = await asyncio.to_thread(forward, run.job_id, pod.name, port)
    atexit.register(way.close)
    try:
        return await connect("127.0.0.1", way.port, Role.CLIENT, read_secret(view.run_dir.secret))
    except (OSError, HandshakeError) as error:
        raise ChannelError(
            f"the head of the run {view.run_id} does not answer",
            where=f"pod {pod.name}, port {port}",
            why=str(error) or "the connection was closed",
            fix="try again in a second",
        ) from error
