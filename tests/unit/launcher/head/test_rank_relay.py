"""A word names a rank or a node; its agent gets the command."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from torchmuster.core.model.ranks import assign_ranks
from torchmuster.launcher.head.parts import ExecRelay, NamedAgents
from torchmuster.launcher.net import part_messages


@dataclass(eq=False)
class Agent:
    name: str
    is_present: bool = True

    @property
    def hello(self):
        return SimpleNamespace(host=f"{self.name}.site")


class Client:
    def __init__(self):
        self.heard = []

    def send_nowait(self, message):
        self.heard.append(message)


@pytest.fixture
def house():
    """Return two nodes of two ranks, the relay and what was sent to agents."""
    agents = {0: Agent("n1"), 1: Agent("n2")}
    attempt = SimpleNamespace(members=agents, ranks=assign_ranks({0: 2, 1: 2}))
    sent = []
    named = NamedAgents(lambda: attempt, lambda member: member.name)
    relay = ExecRelay(named.find, lambda member, m: sent.append((member, m)), named.why_not)
    return SimpleNamespace(agents=agents, relay=relay, sent=sent)


def start(word, exec_id="e"):
    return part_messages.ExecStart(exec_id=exec_id, task=word, argv=("true",))


@pytest.mark.parametrize(
    ("word", "place"), [("rank 0", 0), ("rank 3", 1), ("node n2", 1), ("node n1.site", 0)]
)
def test_the_agent_that_is_named_gets_the_command(house, word, place):
    client = Client()
    house.relay.from_client(client, start(word))
    assert [member for member, _ in house.sent] == [house.agents[place]]
    house.relay.from_agent(house.agents[place], part_messages.ExecEnded(exec_id="e", code=3))
    assert client.heard == [part_messages.ExecEnded(exec_id="e", code=3)]


@pytest.mark.parametrize(
    ("word", "what", "why"),
    [
        ("rank 4", "the run has no rank 4 now", "it has ranks 0 to 3"),
        ("node n22", "the run has no node `n22` now", "did you mean n2?"),
        ("train", "the run has no rank  now", "it has ranks 0 to 3"),
    ],
)
def test_who_is_not_there_is_refused_with_what_is(house, word, what, why):
    client = Client()
    house.relay.from_client(client, start(word))
    assert client.heard == [part_messages.ExecRefused(exec_id="e", what=what, why=why)]


def test_another_agent_can_not_answer_for_a_rank(house):
    client = Client()
    house.relay.from_client(client, start("rank 0"))
    house.relay.from_agent(house.agents[1], part_messages.ExecEnded(exec_id="e", code=0))
    assert client.heard == []


def test_a_lost_node_ends_its_commands(house):
    client = Client()
    house.relay.from_client(client, start("rank 0"))
    house.relay.agent_gone(house.agents[0], "n1 was lost")
    assert client.heard == [part_messages.ExecEnded(exec_id="e", code=137, why="n1 was lost")]


def test_a_client_that_goes_leaves_nothing_behind(house):
    client = Client()
    house.relay.from_client(client, start("rank 2"))
    house.relay.client_gone(client)
    assert house.sent[-1] == (house.agents[1], part_messages.ExecLeave(exec_id="e"))


def test_before_the_first_attempt_there_is_nobody():
    client = Client()
    named = NamedAgents(lambda: None, lambda member: "")
    relay = ExecRelay(named.find, lambda member, message: None, named.why_not)
    relay.from_client(client, start("rank 0"))
    assert client.heard[0].what == "no worker of the run has started yet"
