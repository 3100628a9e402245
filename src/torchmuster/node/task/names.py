"""The wait for the names of other pods: DNS learns them some time after the pods run, and remembers for a while what it did not know."""

import asyncio
import socket
from collections.abc import Callable, Iterable

_LIMIT_S = 60.0
_AGAIN_S = 0.5
_SAY_AFTER_S = 3.0


async def wait_for_names(names: Iterable[str], doing: Callable[[str], None]) -> None:
    """Wait until all names are known here, at most a minute: a command that needs one of them says so itself then."""
    loop = asyncio.get_running_loop()
    begun, has_said = loop.time(), False
    missing = set(names)
    while True:
        missing = {name for name in missing if not await _is_known(name)}
        waited_s = loop.time() - begun
        if not missing or waited_s > _LIMIT_S:
            return
        if waited_s > _SAY_AFTER_S and not has_said:
            has_said = True
            doing(f"waiting for DNS to know {', '.join(sorted(missing)[:4])}")
        await asyncio.sleep(_AGAIN_S)


async def _is_known(name: str) -> bool:
    try:
        await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return True
