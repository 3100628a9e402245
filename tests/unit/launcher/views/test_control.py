import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from kit.ports import reserve_port
from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import AT_ONCE, StopCause
from torchmuster.core.net.address import write_secret
from torchmuster.core.owner.create import write_owner
from torchmuster.errors import ChannelError, NotFoundError
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.views import control
from torchmuster.launcher.views.control import LogChoice, log_files, offset_of_last_lines, send_stop
from torchmuster.launcher.views.find import view_run


@pytest.fixture
def view(run_dir):
    for attempt in (0, 2, 10):
        os.makedirs(run_dir.attempt_logs(attempt))
        for rank in range(attempt + 1):
            Path(run_dir.rank_log(attempt, rank)).touch()
    return view_run(run_dir)


def test_the_last_attempt_is_meant_unless_another_is_named(view):
    assert log_files(view, LogChoice(rank=10)) == [(10, view.run_dir.rank_log(10, 10))]


def test_ranks_come_in_the_order_of_their_numbers(view):
    files = [(rank, view.run_dir.rank_log(10, rank)) for rank in range(11)]
    assert log_files(view, LogChoice(attempt=10)) == files


@pytest.mark.parametrize(
    ("choice", "what", "why"),
    [
        (LogChoice(attempt=1), "no attempt 1", "it has attempts 0,2,10"),
        (LogChoice(attempt=2, rank=3), "no log of rank 3", "it has logs of ranks 0-2"),
    ],
    ids=["an attempt that never was", "a rank without a log"],
)
def test_what_has_no_log_is_refused_with_those_that_have_one(view, choice, what, why):
    with pytest.raises(NotFoundError, match=what) as caught:
        log_files(view, choice)
    assert caught.value.why == why


@pytest.mark.parametrize(
    ("state", "words"), [(RunState.RUNNING, "no logs yet"), (RunState.FAILED, "no logs")]
)
def test_logs_are_not_promised_of_a_run_that_has_ended(run_dir, state, words):
    with pytest.raises(NotFoundError) as caught:
        log_files(replace(view_run(run_dir), state=state), LogChoice())
    assert caught.value.what.endswith(words)


def test_cancel_turns_to_the_owner_when_the_head_is_not_to_be_reached(view, monkeypatch):
    """The owner ends a head that stands still, which never answers."""
    run_dir = view.run_dir
    write_owner(run_dir)
    write_secret(run_dir.secret, bytes(32))
    atomic.write_json(run_dir.head, {"host": "127.0.0.1", "port": reserve_port()})
    sent = []
    monkeypatch.setattr(proc, "kill_quietly", lambda pid, signum: sent.append((pid, signum)))
    asyncio.run(send_stop(view, signal.SIGTERM, at_once=True))
    assert sent == [(os.getpid(), AT_ONCE)]


def test_cancel_tells_the_head_where_the_scheduler_does_not_answer(view, monkeypatch):
    def refuse(_run_dir):
        raise EngineError("job 7.ctl can't be cancelled", why="Couldn't connect to cluster: ctl")

    heard = []
    head = SimpleNamespace(send_nowait=heard.append, close=AsyncMock())
    monkeypatch.setattr(control, "cancel_jobs", refuse)
    monkeypatch.setattr(control, "call_head", AsyncMock(return_value=head))
    asyncio.run(send_stop(view, signal.SIGTERM, at_once=False))
    assert [(stop.signum, stop.cause) for stop in heard] == [(signal.SIGTERM, StopCause.USER)]


async def test_a_stop_of_a_run_that_has_only_begun_waits_for_its_head(view, monkeypatch):
    seen = []

    async def call_head(view):
        seen.append(atomic.read_json(view.run_dir.head) is not None)
        raise ChannelError("nobody listens there")

    write_owner(view.run_dir)
    monkeypatch.setattr(control, "call_head", call_head)
    monkeypatch.setattr(control, "_signal_owner", lambda *_, **__: None)
    sending = asyncio.create_task(send_stop(view, signal.SIGTERM, at_once=False))
    await asyncio.sleep(0.2)
    assert seen == []
    atomic.write_json(view.run_dir.head, {"pid": os.getpid()})
    await sending
    assert seen == [True]


@pytest.mark.parametrize(
    ("text", "num_lines", "rest"),
    [
        ("a\nb\nc\n", 1, "c\n"),
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 1, "c"),  # a line that still grows
        ("a\nb\n", 9, "a\nb\n"),
        ("a\nb\n", 0, ""),
        ("", 3, ""),
        ("x" * 70_000 + "\n" + "y" * 70_000 + "\n", 1, "y" * 70_000 + "\n"),
    ],
)
def test_the_last_lines_begin_where_they_begin(tmp_path, text, num_lines, rest):
    path = tmp_path / "log"
    path.write_text(text)

    assert text[offset_of_last_lines(str(path), num_lines) :] == rest


def test_a_file_that_is_not_there_has_no_last_lines(tmp_path):
    assert offset_of_last_lines(str(tmp_path / "none"), 3) == 0
