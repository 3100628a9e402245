"""Where the output of this node's workers is shown: on this terminal, or by the head's clients; and what is lost of it."""

import string

from torchmuster.model import contract
from torchmuster.model.ranks import NodeRanks
from torchmuster.net import messages
from torchmuster.node.head_link import HeadLink
from torchmuster.node.options import AgentOptions
from torchmuster.node.voice import Voice

_MAX_UNSENT_BYTES = 1 << 20
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

    def prefix_lines(self, ranks: NodeRanks, environment: dict[str, str]) -> None:
        """Let the lines shown here begin as torchrun's template says, if there is one."""
        template = environment.get(contract.PREFIX_VARIABLE)
        if not template or not self._options.local_show:
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
        channel = self._link.channel
        if channel is None or channel.unsent_bytes > _MAX_UNSENT_BYTES:
            self._not_shown[rank] = self._not_shown.get(rank, 0) + left_out + text.count("\n")
            return
        left_out += self._not_shown.pop(rank, 0)
        for start in range(0, len(text) or 1, _MAX_TEXT):
            channel.send_nowait(
                messages.Output(
                    rank=rank,
                    attempt=attempt,
                    stream=stream,
                    text=text[start : start + _MAX_TEXT],
                    dropped_lines=left_out if start == 0 else 0,
                )
            )

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
