"""Serve GET /metrics over HTTP on the loopback, for a Prometheus on this machine.

The page has no secrets, but belongs to one user: nobody outside the machine gets it, nor does a web
page that reaches the loopback under another name (DNS rebinding). Requests are bounded in size,
time and number; only their first line and their host are read.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable

_MAX_REQUEST_BYTES = 8192
_TIME_LIMIT_S = 5.0
_MOST_AT_ONCE = 16
_HOST = re.compile(rb"\r\nhost:[ \t]*([^\r\n]*)\r\n", re.IGNORECASE)
_OWN_NAMES = re.compile(rb"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?")


class MetricsPage:
    """Serves one page.

    Args:
        content_type: The page's content type.
        make: Returns its text; called for each request.
    """

    def __init__(self, content_type: str, make: Callable[[], str]) -> None:
        self._content_type, self._make = content_type, make
        self._num_open = 0

    async def serve(self, listening: socket.socket) -> None:
        """Serve until cancelled."""
        server = await asyncio.start_server(self._answer, sock=listening, limit=_MAX_REQUEST_BYTES)
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            if self._num_open <= _MOST_AT_ONCE:
                async with asyncio.timeout(_TIME_LIMIT_S):
                    request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._response(request))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        finally:
            self._num_open -= 1
            with contextlib.suppress(OSError):
                writer.close()

    def _response(self, request: bytes) -> bytes:
        words = request.split(b"\r\n", 1)[0].split(b" ")
        host = _HOST.search(request)
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _page("400 Bad Request", "text/plain", "not HTTP/1\n")
        if host is not None and not _OWN_NAMES.fullmatch(host[1].strip()):
            return _page("403 Forbidden", "text/plain", "ask for localhost\n")
        if words[0] != b"GET" or words[1].partition(b"?")[0] != b"/metrics":
            return _page("404 Not Found", "text/plain", "GET /metrics\n")
        return _page("200 OK", self._content_type, self._make())


def _page(status: str, content_type: str, text: str) -> bytes:
    body = text.encode(errors="replace")
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
