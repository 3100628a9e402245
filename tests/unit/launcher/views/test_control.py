import asyncio
import os
import signal
from dataclasses import replace

import pytest

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import AT_ONCE, StopCause
from torchmuster.core.net.address import bind
from torchmuster.core.owner.create import write_owner
from torchmuster.errors import ChannelError, NotFoundError
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.views.control import LogChoice, log_files, offset_of_last_lines, send_stop
from torchmuster.launcher.views.find import view_run


@pytest.fixture
def view(tmp_path):
    run_dir = RunDir(str(tmp_path / "r"))
    for attempt in (0, 2, 10):
        os.makedirs(run_dir.attempt_logs(attempt))
        for rank in range(attempt + 1):
            with open(run_dir.rank_log(attempt, rank), "w"):
                pass
    return view_run(run_dir)


def test_the_last_attempt_is_meant_unless_another_is_named(view):
    assert log_files(view, LogChoice(rank=10)) == [(10, view.run_dir.rank_log(10, 10))]


def test_ranks_come_in_the_order_of_their_numbers(view):
    assert log_files(view, LogChoice(attempt=10)) == [
        (rank, view.run_dir.rank_log(10, rank)) for rank in range(11)
    ]


def test_an_attempt_that_never_was_is_refused_with_those_that_were(view):
    with pytest.raises(NotFoundError, match="no attempt 1") as caught:
        log_files(view, LogChoice(attempt=1))
    assert caught.value.why == "it has attempts 0,2,10"


def test_a_rank_without_a_log_is_refused_with_those_that_have_one(view):
    with pytest.raises(NotFoundError, match="no log of rank 3") as caught:
        log_files(view, LogChoice(attempt=2, rank=3))
    assert caught.value.why == "it has logs of ranks 0-2"


@pytest.mark.parametrize(("ended", "words"), [(False, "no logs yet"), (True, "no logs")])
def test_logs_are_not_promised_of_a_run_that_has_ended(tmp_path, ended, words):
    folder = RunDir(str(tmp_path / "r"))
    os.makedirs(folder.path)
    state = RunState.FAILED if ended else RunState.RUNNING
    with pytest.raises(NotFoundError) as caught:
        log_files(replace(view_run(folder), state=state), LogChoice())
    assert caught.value.what.endswith(words)


def test_cancel_turns_to_the_owner_when_the_head_is_not_to_be_reached(view, monkeypatch):
    """The owner ends a head that stands still, which never answers."""
    run_dir = view.run_dir
    facts = proc.read_process(os.getpid())
    owner = {"pid": os.getpid(), "start_ticks": facts.start_ticks, "boot_id": proc.boot_id()}
    atomic.write_json(run_dir.owner, {**owner, "host": os.uname().nodename})
    with bind("127.0.0.1", 0) as nobody:
        port = nobody.getsockname()[1]
    atomic.write_json(run_dir.head, {"host": "127.0.0.1", "port": port})
    with open(run_dir.secret, "w") as file:
        file.write("00" * 32)
    os.chmod(run_dir.secret, 0o600)
    sent = []
    monkeypatch.setattr(proc, "kill_quietly", lambda pid, signum: sent.append((pid, signum)))
    asyncio.run(send_stop(view, signal.SIGTERM, at_once=True))
    assert sent == [(os.getpid(), AT_ONCE)]


def test_cancel_tells_the_head_where_the_scheduler_does_not_answer(view, monkeypatch):
    def refuse(_run_dir):
        raise EngineError("job 7.ctl can't be cancelled", why="Couldn't connect to cluster: ctl")

    class Head:
        def __init__(self):
            self.heard = []
            self.send_nowait = self.heard.append

        async def close(self):
            """Nothing is open."""

    head = Head()

    async def connected(_view):
        return head

    monkeypatch.setattr("torchmuster.launcher.views.control.cancel_jobs", refuse)
    monkeypatch.setattr("torchmuster.launcher.views.control.call_head", connected)
    asyncio.run(send_stop(view, signal.SIGTERM, at_once=False))
    assert [(stop.signum, stop.cause) for stop in head.heard] == [(signal.SIGTERM, StopCause.USER)]


async def test_a_stop_of_a_run_that_has_only_begun_waits_for_its_head(view, monkeypatch):
    seen = []

    async def call_head(view):
        seen.append(atomic.read_json(view.run_dir.head) is not None)
        raise ChannelError("nobody listens there")

    write_owner(view.run_dir)
    monkeypatch.setattr("torchmuster.launcher.views.control.call_head", call_head)
    monkeypatch.setattr("torchmuster.launcher.views.control._signal_owner", lambda *_, **__: None)
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
