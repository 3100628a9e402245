"""Waiting for pods: who is missing, and why."""

import asyncio
import os

import pytest

from kit.ports import reserve_port
from torchmuster.core.net.address import bind
from torchmuster.core.net.listener import Listener
from torchmuster.errors import JoinTimeoutError
from torchmuster.kubernetes.firstpod.others import PodWait
from unit.core.net.loopback import SECRET
from unit.kubernetes.pods.conftest import order_of


async def serve(channel):
    await channel.receive()


def wait(order, *, least, most, limit_s=0.3, doors=(), said=None):
    """Wait for pods of which those on this machine have a door; the first is 127.0.0.1."""

    async def go():
        listeners = [
            Listener(bind("127.0.0.1", port), (SECRET, None), serve, lambda peer, error: None)
            for port in doors
        ]
        serving = [asyncio.create_task(one.serve()) for one in listeners]
        say = said.append if said is not None else (lambda _: None)
        pods = PodWait(order=order, secret=SECRET, least=least, most=most, last_call_s=0.0, say=say)
        try:
            return await asyncio.wait_for(pods.wait(limit_s), 60)
        finally:
            for one in serving:
                one.cancel()

    return asyncio.run(go())


def test_enough_pods_are_not_kept_waiting_for_more():
    port = reserve_port()
    order = order_of(job="no-such-run.invalid", num_pods=3, port=port)
    assert wait(order, least=1, most=3, doors=[port], limit_s=30.0) == [0]


def test_time_in_which_the_cluster_has_no_room_does_not_count(tmp_path):
    """A client says so again and again; when it does no more, the limit counts on."""
    port = reserve_port()
    order = order_of(job="run.invalid", num_pods=2, port=port, home=str(tmp_path))
    os.makedirs(order.folder)
    with open(order.no_room, "w") as note:
        note.write("no node has room for it now")
    said = []

    def say(text):
        said.append(text)
        if len(said) == 5:
            os.unlink(order.no_room)

    pods = PodWait(
        order=order,
        secret=SECRET,
        least=2,
        most=2,
        last_call_s=0.0,
        say=say,
        say_every_s=0.1,
    )
    with pytest.raises(JoinTimeoutError):
        asyncio.run(pods.wait(0.25))
    assert all(text.endswith("; no node has room for it now") for text in said[:5])


def test_missing_pods_are_named_with_why_each_is_missing():
    port = reserve_port()
    order = order_of(job="run.invalid", num_pods=2, port=port)
    with pytest.raises(JoinTimeoutError) as caught:
        wait(order, least=2, most=2, doors=[port])
    error = caught.value
    assert error.what == "only 1 of 2 pods came within 0 s"
    assert (error.where, error.why) == ("run.invalid-1", "run.invalid-1 (its name is not known)")
    assert error.fix.startswith("`kubectl describe pod run.invalid-1` tells what it waits for")
    assert "the cluster's DNS or the run's headless Service" in error.fix


def test_a_door_that_is_closed_is_no_matter_of_names():
    order = order_of(job="run.invalid", num_pods=1, port=reserve_port())
    with pytest.raises(JoinTimeoutError) as caught:
        wait(order, least=1, most=1)
    assert caught.value.why == "run.invalid-0 (Connection refused)"
    assert "DNS" not in caught.value.fix
