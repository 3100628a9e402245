"""The page for Prometheus: what it answers, to whom, and what it does not wait for."""

import asyncio
import contextlib

import pytest

from torchmuster.core.net.address import bind
from torchmuster.launcher.net.scrape import MetricsPage

ASK = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9400\r\n\r\n"


async def answers(*requests):
    """Return what the page answers to each of these, one connection after the other."""
    listening = bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    page = MetricsPage("text/x", lambda: "the page\n")
    serving = asyncio.create_task(page.serve(listening))
    found = []
    try:
        for request in requests:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            writer.write_eof()
            found.append(await reader.read())
            writer.transport.abort()  # what it was told to send may be more than was read
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return found


def ask(*requests):
    return asyncio.run(answers(*requests))


def test_it_serves_one_page():
    (answer,) = ask(ASK)
    head, body = answer.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Type: text/x" in head
    assert b"Content-Length: 9" in head
    assert body == b"the page\n"


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", b"404"),
        (b"POST /metrics HTTP/1.1", b"404"),
        (b"GET /metrics?x=1 HTTP/1.0", b"200"),
        (b"nonsense", b"400"),
        (b"GET /metrics SSH-2.0", b"400"),
    ],
)
def test_anything_else_is_refused(request_line, status):
    (answer,) = ask(request_line + b"\r\nHost: localhost\r\n\r\n")
    assert answer.split(b" ")[1] == status


@pytest.mark.parametrize("host", [b"evil.example", b"127.0.0.1.evil.example", b"10.0.0.1:9400"])
def test_a_browser_that_was_sent_here_by_another_name_gets_nothing(host):
    (answer,) = ask(ASK.replace(b"127.0.0.1:9400", host))
    assert answer.split(b" ")[1] == b"403"


def test_a_request_without_an_end_or_of_any_length_is_closed_and_the_next_is_served():
    made = ask(b"GET /metrics", b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 100_000, ASK)
    assert made[:2] == [b"", b""]
    assert made[2].startswith(b"HTTP/1.1 200")
