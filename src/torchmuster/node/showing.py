"""Where the output of this node's workers is shown: on this terminal, or by the head's clients; and what is lost of it.

What is for a terminal is left out when the connection to the head has no room. What is for a file or a pipe waits here,
and then the workers, as for a disk: while the head takes something. It never waits for a reader.
"""

import asyncio
import string
import time
from collections import deque

from torchmuster.model import contract
from torchmuster.model.liveness.lease import LEASE_S
from torchmuster.model.ranks import NodeRanks
from torchmuster.net import messages
from torchmuster.node.head_link import HeadLink
from torchmuster.node.options import AgentOptions
from torchmuster.node.output import Voice

_MAX_UNSENT_BYTES = 1 << 20
_MAX_WAITING_BYTES = 32 << 20
_CONGESTED_BYTES = 1 << 20
_PATIENCE_S = 0.5
_LOOK_AGAIN_S = 0.01
_MAX_TEXT = 1 << 16


class Showing:
    """Shows what workers write.

    Args:
        options: The agent's.
        link: Its connection to the head.
        voice: This node's terminal or log.
    """

    def __init__(self, options: AgentOptions, link: HeadLink, voice: Voice) -> None:
        self._options, self._link, self._voice = options, link, voice
        self._lost_lines: dict[str, int] = {}
        self._not_shown: dict[int, int] = {}  # lines of a rank that the channel had no room for
        self._waiting: deque[messages.Output] = deque()
        self._waiting_bytes = 0
        self._moved_at = 0.0
        self._sends_again = False

    def prefix_lines(self, ranks: NodeRanks, environment: dict[str, str]) -> None:
        """Let the lines shown here begin as torchrun's template says, if there is one."""
        template = environment.get(contract.PREFIX_VARIABLE)
        if template is None or not self._options.local_show:
            return
        for local_rank in range(ranks.num_workers):
            rank, role = ranks.first_rank + local_rank, self._options.plan.role
            words = {"role_name": role, "rank": rank, "local_rank": local_rank}
            self._voice.prefix_rank(rank, string.Template(template).safe_substitute(words))

    def show(self, attempt: int, rank: int, stream: int, text: str, left_out: int) -> None:
        """Show what a rank of an attempt has written; `left_out` lines are missing before it."""
        if self._options.local_show:
            self._voice.show(rank, stream, text, left_out)
            return
        if not self._has_room(stream):
            self._not_shown[rank] = self._not_shown.get(rank, 0) + left_out + text.count("\n")
            return
        left_out += self._not_shown.pop(rank, 0)
        for start in range(0, len(text) or 1, _MAX_TEXT):
            output = messages.Output(
                rank=rank,
                attempt=attempt,
                stream=stream,
                text=text[start : start + _MAX_TEXT],
                dropped_lines=left_out if start == 0 else 0,
            )
            self._waiting.append(output)
            self._waiting_bytes += len(output.text)
        self._send_waiting()

    def _has_room(self, stream: int) -> bool:
        if stream in self._options.plan.every_line:
            return self._waiting_bytes <= _MAX_WAITING_BYTES
        channel = self._link.channel
        return channel is not None and channel.unsent_bytes <= _MAX_UNSENT_BYTES

    def _send_waiting(self) -> None:
        channel = self._link.channel
        while self._waiting and channel is not None and channel.unsent_bytes <= _MAX_UNSENT_BYTES:
            output = self._waiting.popleft()
            self._waiting_bytes -= len(output.text)
            self._moved_at = time.monotonic()
            channel.send_nowait(output)
        if self._waiting and not self._sends_again:
            self._sends_again = True
            asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._send_again)

    def _send_again(self) -> None:
        self._sends_again = False
        self._send_waiting()

    def is_congested(self) -> bool:
        """Return whether the head takes what is shown, but slower than it is written, so that a short wait helps."""
        return self._waiting_bytes > _CONGESTED_BYTES and self._has_moved(_PATIENCE_S)

    def _has_moved(self, within_s: float) -> bool:
        return time.monotonic() - self._moved_at < within_s

    async def settle(self) -> None:
        """Let the head have what was written before it hears more of an attempt, unless it takes nothing for a lease."""
        while self._waiting and self._has_moved(LEASE_S):
            await asyncio.sleep(_LOOK_AGAIN_S)

    def lose(self, lines: int, why: str) -> None:
        """Count lines of logs that the disk did not take; a new reason is told to the user."""
        first = why not in self._lost_lines
        self._lost_lines[why] = self._lost_lines.get(why, 0) + lines
        text = (
            f"logs are being lost on {self._options.host}: {why}; the job continues"
            if first
            else ""
        )
        level = {"level": "warning"} if first else {}
        self._link.send(messages.Notice(text=text, logs_lost_lines=lines, **level))
