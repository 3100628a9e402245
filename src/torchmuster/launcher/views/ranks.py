"""The client's side of `muster stacks`, and of `muster exec` in a training run: talks to the head.

The agents do the work, so no ssh to the nodes is needed. The head's addresses and key are in the
run directory.
"""

import asyncio
import os
import secrets
from dataclasses import dataclass

from torchmuster.core import proc
from torchmuster.core.files.layout import Kind, short_id
from torchmuster.core.model.events import WorkerProcessEvent
from torchmuster.core.net.channel import Channel, ChannelClosedError
from torchmuster.errors import ChannelError, HeadLostError, UsageError
from torchmuster.launcher.head.hang_monitor import shown, standing_of
from torchmuster.launcher.head.hang_watch import Seen, tell
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.node.stacks import take_stacks
from torchmuster.launcher.views.execute import ExecOrder, ExecResult, ExecSession, Write
from torchmuster.launcher.views.find import any_result, owner_lives
from torchmuster.launcher.views.head_call import call_head
from torchmuster.launcher.views.run_view import RunView

ANSWER_LIMIT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksFound:
    """Where the ranks are: one sentence, and all stacks."""

    sentence: str
    lines: tuple[str, ...]


async def ask_stacks(view: RunView, limit_s: float = ANSWER_LIMIT_S) -> StacksFound:
    """Return the stacks of all ranks of a live run.

    Raises:
        UsageError: The run has ended, or is a workflow.
        ChannelError: The head can't be reached, or does not answer within `limit_s`.
    """
    check_running(view)
    if (member := _own_process(view)) is not None:
        return await asyncio.to_thread(_stacks_of, member)
    if view.is_headless_member:
        what = f"the process of {view.run_id} is not in its record yet, or has ended"
        raise ChannelError(what, where=view.run_dir.events, fix="try again in a second")
    channel = await call_head(view)
    ask_id = secrets.token_hex(8)
    lines: list[str] = []
    try:
        channel.send_nowait(part_messages.AskStacks(ask_id=ask_id))
        async with asyncio.timeout(limit_s):
            while True:
                answer = await channel.receive()
                if not isinstance(answer, part_messages.StacksReport) or answer.ask_id != ask_id:
                    continue
                lines += answer.lines
                if answer.is_last:
                    return StacksFound(sentence=answer.sentence, lines=tuple(lines))
    except TimeoutError as error:
        raise ChannelError(
            f"the head of the run {view.run_id} did not answer within {limit_s:g} s",
            fix="try again",
        ) from error
    except ChannelClosedError as error:
        raise HeadLostError("the connection to the run has ended", why=str(error)) from error
    finally:
        await channel.close()


def _own_process(view: RunView) -> WorkerProcessEvent | None:
    """Return the local process of a sweep's member without a head; None for all others."""
    if os.path.exists(view.run_dir.head):
        return None
    found = view.record.process
    return found if found is not None and proc.read_process(found.pid) is not None else None


def _stacks_of(member: WorkerProcessEvent) -> StacksFound:
    (stack,) = take_stacks(member.folder, member.attempt, [(0, member.pid)])
    seen = Seen(rank=0, node=os.uname().nodename, standing=standing_of(stack), kernel=stack.kernel)
    return StacksFound(sentence=tell([seen]), lines=tuple(shown(stack).splitlines()))


async def execute_at_rank(view: RunView, word: str, order: ExecOrder, write: Write) -> ExecResult:
    """Run a command next to a rank, or on a node.

    Args:
        view: A training run.
        word: `rank 3` or `node n2`.
        order: What to run.
        write: Gets the output.

    Raises:
        UsageError: The run has ended, or has no such rank or node.
        ChannelError: The head can't be reached.
        HeadLostError: The connection to the head was lost.
    """
    channel = await connect_to_run(view)
    try:
        return await ExecSession(channel, [word], order, write).run()
    finally:
        await channel.close()


async def connect_to_run(view: RunView) -> Channel:
    """Connect to the head of a live run.

    Raises:
        UsageError: The run has ended, or is a workflow.
        ChannelError: The head can't be reached.
    """
    check_running(view)
    return await call_head(view)


def check_running(view: RunView) -> None:
    """Refuse a workflow, and a run that has ended.

    Raises:
        UsageError: It is one of these.
    """
    if view.kind is Kind.WORKFLOW:
        raise UsageError(
            f"the run {view.run_id} is a workflow: its tasks have no ranks of their own",
            fix=f"muster exec {short_id(view.run_id)} TASK -- COMMAND; a training task's own run by its folder",
        )
    if any_result(view.run_dir) is not None or not owner_lives(view.run_dir):
        raise UsageError(
            f"the run {view.run_id} has ended: it is {view.state.value}",
            fix=f"muster explain {short_id(view.run_id)}",
        )
