"""The head of a run inside an agent's process, from the start or as a replacement."""

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchmuster.core import plugs
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.head.options import OWNER_S
from torchmuster.core.model.events import RecordEvent, RunEndedEvent
from torchmuster.errors import HeadLostError, found_bug

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.head.options import TrainingHeadOptions
    from torchmuster.core.head.training_head import TrainingHead
    from torchmuster.core.model.verdict import Result
    from torchmuster.core.node.agent import Agent
    from torchmuster.core.node.options import HeadPlace
    from torchmuster.core.node.output import Voice

EX_SOFTWARE = 70
_LAST_S = 3.0


class StorePorts:
    """Binds the port of every attempt's store in advance.

    The port is known, and connections queue in the kernel, before the store's process starts.
    """

    def __init__(self) -> None:
        self._listening: dict[int, socket.socket] = {}

    def open(self, attempt: int, address: str) -> int:
        """Bind and return a port for an attempt's store."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.bind((address, 0))
            listening.listen(4096)
        except OSError:
            listening.close()
            raise
        self._listening[attempt] = listening
        return int(listening.getsockname()[1])

    def take(self, attempt: int) -> socket.socket | None:
        """Return the listening socket for an attempt, once; None if the head is elsewhere."""
        return self._listening.pop(attempt, None)


class HeadHost:
    """Hosts a head alongside an agent.

    Args:
        disk: Writes the record.
        voice: Shows events, if it is a terminal.

    Attributes:
        ports: Ports of the attempts' stores.
        head: The head, if it runs here.
    """

    def __init__(self, disk: DiskWriter, voice: "Voice") -> None:
        self._disk, self._voice = disk, voice
        self.ports = StorePorts()
        self.head: TrainingHead | None = None
        self._conducting: asyncio.Task[Result] | None = None

    def begin(
        self,
        options: "TrainingHeadOptions",
        listening: socket.socket,
        place: "HeadPlace",
        agent: "Agent",
    ) -> "TrainingHead":
        """Start the head, which ends its agent when it ends.

        Args:
            options: Options of the head.
            listening: Its socket.
            place: Keys of the channel.
            agent: The agent of this process.
        """
        from torchmuster.core.files.terminal import TerminalVoice
        from torchmuster.core.head.training_head import TrainingHead

        voice = self._voice
        show = _result_printer(voice, options.run_dir) if isinstance(voice, TerminalVoice) else None
        self.head = head = TrainingHead(options, self._disk, self.ports.open, show)
        if options.spread is not None:
            options.spread.begin(head.event)
        self._conducting = asyncio.create_task(_conduct(head, listening, place))
        self._conducting.add_done_callback(lambda task: _end_with_head(task, agent))
        return head

    async def end(self) -> None:
        """Wait for the head's last messages, after its agent has ended."""
        if self._conducting is not None and self.head is not None:
            late_s = OWNER_S if self.head.is_over else 0.0
            limit_s = None if self.head.may_have_unsent_messages else _LAST_S + late_s
            await asyncio.wait({self._conducting}, timeout=limit_s)
            self._conducting.cancel()


async def _conduct(head: "TrainingHead", listening: socket.socket, place: "HeadPlace") -> "Result":
    from torchmuster.core.net.listener import Listener, StoreRelay

    relay = StoreRelay(head.store_address, head.notice) if head.options.relay_port else None
    secrets = (place.secret, place.open_secret)
    head.serves_open_key = place.open_secret is not None
    listener = Listener(listening, secrets, head.serve, head.refuse_stranger, relay)
    serving = [asyncio.create_task(listener.serve())]
    serving += [asyncio.create_task(_serve_part(head, name)) for name in head.parts]
    try:
        return await head.conduct()
    finally:
        for task in serving:
            task.cancel()


async def _serve_part(head: "TrainingHead", name: str) -> None:
    """Run a part; report if it fails."""
    try:
        await head.parts[name].serve()
    except Exception as error:  # noqa: BLE001 - a part may be of another package
        why = f"{type(error).__name__}: {error}"
        head.notice(f"the part `{name}` of the head works no more: {why}")


def _result_printer(voice: "TerminalVoice", run_dir: "RunDir") -> Callable[["RecordEvent"], None]:
    def tell(event: "RecordEvent") -> None:
        result = event.result if isinstance(event, RunEndedEvent) else None
        if result is not None and result.report is not None:
            from torchmuster.core.model.narration import shortened
            from torchmuster.core.model.text import render_report

            explained: Any = plugs.find("ends", "explain")
            report = result.report if explained is None else explained(result, run_dir)
            if report is not None:
                voice.print(render_report(shortened(report, result, voice.shown)))
            return
        voice.tell(event)

    return tell


def _end_with_head(task: "asyncio.Task[Result]", agent: "Agent") -> None:
    """End the agent when the head ends or crashes."""
    if task.cancelled():
        return
    error = task.exception()
    if error is None:
        agent.leave(task.result().exit_code)
    elif isinstance(error, HeadLostError):
        agent.fail(error)  # another head has replaced it
    else:
        bug = found_bug("the head of the run", error)
        bug.exit_code = EX_SOFTWARE
        agent.fail(bug)
