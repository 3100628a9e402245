"""An owner who wants every line hears all in order, over one connection after the other."""

import asyncio

from kit.waiting import wait_until_async
from torchmuster.core.files.disk import Backlog
from torchmuster.core.head.head import Outlet
from torchmuster.core.net import messages

MANY = 20_000


class Line:
    """A connection that takes so many messages and then ends, or none while it stands still."""

    def __init__(self, num_taken, *, stands=False):
        self.heard = []
        self.unsent_bytes = 2 << 20 if stands else 0
        self._left = num_taken

    def send_nowait(self, message):
        self.heard.append(message.text)

    async def send_bytes(self, data):
        if not self._left:
            raise ConnectionResetError
        self._left -= 1
        self.heard.append(messages.decode(data).text)
        await asyncio.sleep(0)


async def test_an_outlet_keeps_order_and_repeats_nothing_when_the_connection_ends(tmp_path, disk):
    outlet = Outlet(Backlog(lambda: str(tmp_path / "untold"), disk))
    first, second = Line(MANY // 4, stands=True), Line(MANY)
    outlet.attach(first)
    for number in range(MANY):
        outlet.send(messages.Output(rank=0, attempt=0, stream=1, text=str(number)))
    await wait_until_async(lambda: outlet.channel is None, "the end of the connection")
    outlet.attach(second)
    await wait_until_async(lambda: len(second.heard) == MANY - MANY // 4, "the rest")
    await wait_until_async(lambda: not any(tmp_path.iterdir()), "the end of the file")
    outlet.send(messages.Output(rank=0, attempt=0, stream=1, text="last"))
    await wait_until_async(lambda: second.heard[-1] == "last", "what came last")
    assert (first.heard + second.heard) == [*map(str, range(MANY)), "last"]
