"""The head's part of `muster exec`: every message goes to whom it belongs, and to nobody else."""

import pytest

from torchmuster.launcher.head.parts import LOST, ExecRelay
from torchmuster.launcher.net import part_messages


class Client:
    """The connection of a client that notes what it gets."""

    def __init__(self):
        self.got = []

    def send_nowait(self, message):
        self.got.append(message)


class Stage:
    """A relay with two running tasks, `a` and `b`."""

    def __init__(self):
        self.sent = []
        self.running = {"a", "b"}
        self.relay = ExecRelay(
            lambda word: word if word in self.running else None,
            lambda task, message: self.sent.append((task, message)),
            lambda word: (f"{word} does not run", "why"),
        )

    def start(self, client, exec_id="1", task="a"):
        start = part_messages.ExecStart(exec_id=exec_id, task=task, argv=("ls",))
        self.relay.from_client(client, start)
        return start


@pytest.fixture
def stage():
    return Stage()


def test_a_start_goes_to_its_task_and_the_output_back_to_its_client(stage):
    first, second = Client(), Client()
    starts = [stage.start(first, "1", "a"), stage.start(second, "2", "b")]
    output = part_messages.ExecOutput(exec_id="2", stream=1, data=b"")
    stage.relay.from_agent("b", output)
    assert stage.sent == [("a", starts[0]), ("b", starts[1])]
    assert (first.got, second.got) == ([], [output])


def test_a_task_that_does_not_run_is_refused_with_the_reason(stage):
    client = Client()
    stage.start(client, task="c")
    assert client.got == [part_messages.ExecRefused(exec_id="1", what="c does not run", why="why")]
    assert stage.relay._routes == {}


def test_a_command_of_another_client_can_t_be_touched(stage):
    stage.start(Client())
    stage.sent.clear()
    other = Client()
    stage.relay.from_client(other, part_messages.ExecSignal(exec_id="1", signum=9))
    stage.relay.client_gone(other)
    assert stage.sent == []


def test_a_number_that_is_taken_is_refused(stage):
    stage.start(Client())
    other = Client()
    stage.start(other)
    assert isinstance(other.got[0], part_messages.ExecRefused)
    assert len(stage.sent) == 1


def test_another_task_can_t_answer(stage):
    client = Client()
    stage.start(client)
    stage.relay.from_agent("b", part_messages.ExecEnded(exec_id="1", code=0))
    assert client.got == []


def test_a_client_that_goes_takes_all_its_commands_with_it(stage):
    client = Client()
    stage.start(client, "1", "a")
    stage.start(client, "2", "b")
    stage.sent.clear()
    stage.relay.client_gone(client)
    assert stage.sent == [
        ("a", part_messages.ExecLeave(exec_id="1")),
        ("b", part_messages.ExecLeave(exec_id="2")),
    ]
    assert stage.relay._routes == {}


@pytest.mark.parametrize(
    "last",
    [
        part_messages.ExecEnded(exec_id="1", code=3),
        part_messages.ExecRefused(exec_id="1", what="no"),
    ],
)
def test_nothing_is_remembered_of_a_command_that_has_ended(stage, last):
    client = Client()
    stage.start(client)
    stage.relay.from_agent("a", last)
    assert client.got == [last]
    assert stage.relay._routes == {}


def test_clients_hear_that_their_task_is_gone_and_others_do_not(stage):
    first, second = Client(), Client()
    stage.start(first, "1", "a")
    stage.start(second, "2", "b")
    stage.relay.agent_gone("a", "it was lost")
    assert first.got == [part_messages.ExecEnded(exec_id="1", code=LOST, why="it was lost")]
    assert second.got == []
