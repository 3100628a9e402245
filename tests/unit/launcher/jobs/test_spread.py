"""When a head starts other hosts' agents, by what the environment says and by who calls."""

import asyncio
import json
import os
import socket
import sys

import pytest

from kit.waiting import wait_until_async
from torchmuster.core.model.events import AgentJoinedEvent, NodeLostEvent
from torchmuster.errors import MusterError
from torchmuster.launcher.engines.allocation import OwnJob
from torchmuster.launcher.jobs import spread
from torchmuster.launcher.model.job import AllocatedNode, Allocation

NODES = tuple(AllocatedNode(name=f"n{k}", slot=k - 1) for k in (1, 2, 3))


class Local:
    """A dialect that notes what is started, and starts a command of the test instead."""

    name = "local"

    def __init__(self, command):
        self.command, self.starts = command, []

    def node_argv(self, start):
        self.starts.append(start)
        return list(self.command)


def test_order_comes_through_the_environment_once(monkeypatch):
    order = spread.SpreadOrder(place=2, host="n3", heads=(("10.0.0.1", 29500), ("10.1.0.1", 29500)))
    monkeypatch.setenv(spread.ORDER, order.to_text())
    assert spread.take_order() == order
    assert spread.ORDER not in os.environ
    assert spread.take_order() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"place": "x", "host": "n2", "heads": []}'])
def test_order_of_nobody_is_an_error(monkeypatch, text):
    monkeypatch.setenv(spread.ORDER, text)
    with pytest.raises(MusterError, match="no order"):
        spread.take_order()


def test_addresses_of_the_head_are_never_loopback_where_there_is_another():
    found = spread.head_addresses("localhost", 29500)
    assert found
    assert all(port == 29500 for _, port in found)
    assert not [a for a, _ in found if a.startswith("127.")] or found == (("127.0.0.1", 29500),)


def test_address_of_the_endpoint_comes_first():
    own = [address for address, _ in spread.head_addresses("localhost", 1)]
    assert spread.head_addresses(own[-1], 1)[0] == (own[-1], 1)


@pytest.fixture
def spreader(tmp_path):
    """Return a function that begins a spreader whose agents are this command."""

    def make(*command, after_s=0.0):
        dialect = Local(command)
        job = OwnJob(dialect=dialect, allocation=Allocation(job_id="1", nodes=NODES))
        made = spread.Spreader(
            party=spread.SpreadHosts(job=job, spreads=True),
            heads=(("10.0.0.1", 1),),
            command=["/bin/muster", "torchrun", "x.py"],
            environment=str(tmp_path / "environment.json"),
            after_s=after_s,
        )
        made.said, made.starts = [], dialect.starts
        made.begin(lambda event: made.said.append(event.text))
        return made

    return make


def joined(node):
    return AgentJoinedEvent(node=node, host=node, pid=1)


FOREVER = (sys.executable, "-c", "import signal; signal.pause()")


async def test_missing_hosts_are_started_with_their_order_and_ended(spreader, tmp_path):
    made = spreader(*FOREVER)
    await wait_until_async(lambda: len(made.starts) == 2, "two starts")
    pids = [start.child.pid for start in made._starts.values()]
    mode = os.stat(tmp_path / "environment.json").st_mode & 0o777
    await made.close()
    first = made.starts[0]
    assert (first.node, first.slot) == ("n2", 1)
    assert [f"{spread.ORDER}=" in word for word in first.command].count(True) == 1
    assert list(first.command[-3:]) == ["/bin/muster", "torchrun", "x.py"]
    assert made.said == [
        "torchrun was started on n1 only: started here for n2, n3 too (--no-spread leaves that to you)"
    ]
    assert mode == 0o600
    assert not (tmp_path / "environment.json").exists()
    assert {str(pid) for pid in pids}.isdisjoint(os.listdir("/proc"))


async def test_nothing_is_started_when_an_agent_of_another_host_calls(spreader):
    made = spreader(*FOREVER, after_s=30.0)
    made.hear(joined("n1"))  # the head's own
    made.hear(joined("n3"))
    await asyncio.wait_for(made._task, 60)
    made.need([1])
    await made.close()
    assert (made.starts, made.said) == ([], [])


async def test_start_that_fails_is_tried_three_times_and_named(spreader):
    made = spreader(sys.executable, "-c", "raise SystemExit(4)")
    await wait_until_async(lambda: len(made.said) == 7, "the last try")
    await made.close()
    assert len(made.starts) == 6
    assert sum("n2: what started its agent ended (exit code 4)" in text for text in made.said) == 3


async def test_lost_agent_is_started_again_when_what_started_it_has_ended(spreader):
    made = spreader(*FOREVER)
    await wait_until_async(lambda: len(made.starts) == 2, "two starts")
    made.hear(joined("n2"))
    made.hear(NodeLostEvent(node="n2", why="killed"))
    made.need([1])
    made._starts[1].child.send_signal(9)
    await wait_until_async(lambda: len(made.starts) == 3, "the third start")
    await made.close()
    assert [start.node for start in made.starts] == ["n2", "n3", "n2"]


async def test_host_that_was_started_here_is_ours(spreader):
    made = spreader(*FOREVER)
    await wait_until_async(lambda: made._starts, "a start")
    ours = made.is_ours("n2.cluster.site"), made.is_ours("n9")
    await made.close()
    assert ours == (True, False)


def test_order_is_plain_json():
    order = spread.SpreadOrder(place=1, host=socket.gethostname(), heads=(("::1", 5),))
    assert json.loads(order.to_text())["heads"] == [["::1", 5]]
