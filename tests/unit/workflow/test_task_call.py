"""What user code in a task calls: `torchmuster.barrier()`, and `muster` as tasks have it."""

import contextlib
import os
import shutil
import socket
import sys
import threading

import pytest

import torchmuster
from kit.command import SOURCE, ran
from torchmuster import errors
from torchmuster.core.model.contract import TASK_SOCKET_VARIABLE
from torchmuster.core.net import ipc
from torchmuster.core.node.setup import make_socket_folder
from torchmuster.workflow import task_call
from torchmuster.workflow.task_call import main, wait_at_barrier
from unit.workflow.fake_head import FakeHead


@contextlib.contextmanager
def agent(monkeypatch, serve):
    """Let `serve(connection)` play the agent for one call, in a thread."""
    path = os.path.join(make_socket_folder(), "task.sock")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        listening.settimeout(20)

        def play():
            connection, _ = listening.accept()
            with connection:
                serve(connection)

        playing = threading.Thread(target=play)
        playing.start()
        monkeypatch.setenv(TASK_SOCKET_VARIABLE, path)
        try:
            yield
        finally:
            playing.join(20)
            os.unlink(path)
            shutil.rmtree(os.path.dirname(path))
    assert not playing.is_alive()


def says(*messages):
    """Return an agent that reads the call, says these and hangs up."""

    def serve(connection):
        ipc.receive(connection, ipc.TaskRequest)
        for message in messages:
            connection.sendall(ipc.pack(message))

    return serve


def test_an_agent_that_can_t_be_reached_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(TASK_SOCKET_VARIABLE, str(tmp_path / "none.sock"))

    with pytest.raises(errors.ChannelError, match="can't be reached") as caught:
        torchmuster.barrier()
    assert caught.value.why == "No such file or directory"


def test_the_question_and_the_answers_travel_in_order_in_whatever_pieces(monkeypatch):
    heard, said = [], []

    def serve(connection):
        heard.append(ipc.receive(connection, ipc.TaskRequest))
        data = ipc.pack(ipc.BarrierWaits(what="b", left_s=1.0)) + ipc.pack(ipc.BarrierReleased())
        for number in range(len(data)):
            connection.sendall(data[number : number + 1])

    with agent(monkeypatch, serve):
        wait_at_barrier("x", count=2, timeout_s=20.0, say=said.append)
    assert heard == [ipc.AskBarrier(name="x", count=2, rank=None, timeout_s=20.0)]
    assert said == ["barrier `x`: b; 1 s left"]


def test_an_agent_that_ends_in_the_wait_is_an_error_at_once(monkeypatch):
    waiting = ipc.BarrierWaits(what="1 of 2 is here, missing: b", left_s=9.6)
    said = []

    with agent(monkeypatch, says(waiting)), pytest.raises(errors.ChannelError, match="has ended"):
        wait_at_barrier("x", timeout_s=3600.0, say=said.append)
    assert said == ["barrier `x`: 1 of 2 is here, missing: b; 10 s left"]


@pytest.mark.parametrize("answer", [b"\0\0\0\2[]", b"\0\0\0\1x", b"x" * 70_000])
def test_what_is_no_answer_of_ours_ends_the_call(monkeypatch, answer):
    def serve(connection):
        ipc.receive(connection, ipc.TaskRequest)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(answer)

    with (
        agent(monkeypatch, serve),
        pytest.raises(errors.ChannelError, match="gave an invalid answer"),
    ):
        torchmuster.barrier()


def test_an_agent_that_never_answers_is_left_at_the_limit_and_its_silence_is_told(monkeypatch):
    monkeypatch.setattr(ipc, "SILENCE_S", 0.05)
    monkeypatch.setattr(task_call, "_SPARE_S", 0.1)
    told = []
    over = threading.Event()

    with agent(monkeypatch, lambda _: over.wait(20)):
        with pytest.raises(errors.ChannelError, match="did not answer in time"):
            wait_at_barrier("x", timeout_s=0.1, say=told.append)
        over.set()
    assert len(told) >= 2
    assert set(told) == {"barrier `x`: no message from the head of the group; 0 s left"}


def test_a_refusal_before_the_request_is_read_reaches_the_caller(monkeypatch):
    def serve(connection):
        connection.sendall(ipc.pack(ipc.CallFailed(what="not you", fix="ask")))

    with agent(monkeypatch, serve), pytest.raises(errors.BarrierError, match="not you") as caught:
        torchmuster.barrier()
    assert caught.value.fix == "ask"


def test_a_request_that_is_too_long_is_not_sent(monkeypatch, tmp_path):
    monkeypatch.setenv(TASK_SOCKET_VARIABLE, str(tmp_path / "none.sock"))

    with pytest.raises(errors.UsageError, match="longer than 262144"):
        wait_at_barrier("y" * 270_000, timeout_s=1)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan")])
def test_a_limit_that_is_none_is_refused(timeout_s):
    with pytest.raises(errors.UsageError, match="not a valid limit for a wait"):
        torchmuster.barrier(timeout_s=timeout_s)


def test_at_the_limit_it_names_who_is_missing_and_exits_as_a_time_out(monkeypatch):
    with FakeHead(("a", "b", "c")) as head:
        monkeypatch.setenv(TASK_SOCKET_VARIABLE, head.paths["a"])
        with pytest.raises(
            errors.BarrierTimeoutError, match=r"within 0\.1 s: missing b, c"
        ) as caught:
            torchmuster.barrier("x", timeout_s=0.1)
    assert caught.value.exit_code == errors.JoinTimeoutError.exit_code == 6
    assert isinstance(caught.value, errors.BarrierError)


def test_a_call_that_the_agent_does_not_understand_is_refused_with_the_field(monkeypatch):
    with FakeHead(("a",)) as head:
        monkeypatch.setenv(TASK_SOCKET_VARIABLE, head.paths["a"])
        with pytest.raises(errors.BarrierError, match="does not understand") as caught:
            torchmuster.barrier(7)
    assert caught.value.why == "name: expected str, got int"


def test_threads_of_one_process_wait_together_round_after_round(monkeypatch):
    num_threads, num_rounds = 8, 20
    counter, orders = [0] * num_threads, []

    def work(rank):
        for number in range(num_rounds):
            counter[rank] = number + 1
            torchmuster.barrier("x", count=num_threads, rank=rank, timeout_s=30.0)
            orders.append(min(counter) >= number + 1)

    with FakeHead(("a",)) as head:
        monkeypatch.setenv(TASK_SOCKET_VARIABLE, head.paths["a"])
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert orders == [True] * (num_threads * num_rounds)


def test_the_library_s_barrier_needs_neither_click_nor_asyncio():
    code = (
        "import sys, torchmuster\n"
        "try: torchmuster.barrier()\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print(sorted({'click', 'asyncio', 'torch'} & set(sys.modules)))"
    )
    environment = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
    done = ran([sys.executable, "-c", code], env={**environment, "PYTHONPATH": SOURCE})

    assert done.stdout.splitlines() == ["UsageError", "[]"]


@pytest.mark.parametrize("words", [["run", "train.py"], ["status"], []])
def test_other_commands_are_said_to_be_elsewhere(words):
    with pytest.raises(errors.UsageError, match="there is no `muster") as caught:
        main(words)
    assert "muster barrier" in caught.value.why


@pytest.mark.parametrize("limit", ["0", "soon"])
def test_a_limit_of_the_command_that_is_none_is_refused(limit):
    with pytest.raises(errors.UsageError, match="the limit is not a time above 0"):
        main(["barrier", "--timeout", limit])


def test_the_words_of_a_barrier_outside_of_a_workflow_are_taken_and_it_needs_a_task(monkeypatch):
    monkeypatch.delenv("TORCHMUSTER_TASK_SOCKET", raising=False)
    with pytest.raises(errors.MusterError):
        main(["barrier", "--num_nodes", "2", "--connect", "host", "--rank", "1", "--port", "1"])
