"""Mutual authentication: a handshake of fixed length, before anything is parsed.

    client -> server   MAGIC  version  role    key  client nonce         44 bytes
    server -> client   MAGIC  version  reason  key  server nonce  MAC    76 bytes
    client -> server   MAC                                               32 bytes
    server -> client   reason  MAC                                       33 bytes

Every MAC is HMAC-SHA256 with the run's secret over a label and all bytes sent so far. So neither
side can be replayed, and each proves that it knows the secret. The two session keys, one for each
direction, are derived from both nonces. `key` is 0 for the run's secret and 1 for the public key,
which proves nothing and is accepted only where nodes have no common secret (`muster torchrun`). A
caller that fails gets a reason byte if it speaks this protocol, and the connection is closed.
"""

import asyncio
import enum
import hmac
import os
import struct
from dataclasses import dataclass

MAGIC = b"MUSTERCH"
VERSION = 2
NONCE_BYTES = 32
MAC_BYTES = 32
_HELLO = struct.Struct(f"!{len(MAGIC)}sHBB{NONCE_BYTES}s")


class Role(enum.IntEnum):
    """The role of the calling side."""

    AGENT = 1
    CLIENT = 2
    PROBE = 3  # an agent that calls another agent's network probe
    SESSION = 4  # a caller that wants a command run in a pod


class Reason(enum.IntEnum):
    """The reason byte: why a connection was closed, or that it was accepted."""

    ACCEPTED = 0
    OTHER_VERSION = 1
    WRONG_SECRET = 2
    NOT_MUSTER = 3
    CLOSED = 4


SENTENCES = {
    Reason.OTHER_VERSION: "the other side uses another version of muster's protocol",
    Reason.WRONG_SECRET: "the other side has another secret",
    Reason.NOT_MUSTER: "what listens there is not muster",
    Reason.CLOSED: "the other side closed the connection during the handshake",
}


class HandshakeError(Exception):
    """The handshake failed; `reason` says how."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(SENTENCES[reason])
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKeys:
    """The two keys of one connection; `is_open`: derived from the public key."""

    role: Role
    send_key: bytes
    receive_key: bytes
    is_open: bool = False


async def call(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    role: Role,
    secret: bytes,
    *,
    is_open: bool = False,
) -> SessionKeys:
    """Run the handshake of the calling side.

    Raises:
        HandshakeError: The other side is not muster, or refused us.
    """
    hello = _HELLO.pack(MAGIC, VERSION, role, int(is_open), os.urandom(NONCE_BYTES))
    writer.write(hello)
    answer = await read_bytes(reader, _HELLO.size + MAC_BYTES)
    magic, version, reason, _, _ = _HELLO.unpack(answer[: _HELLO.size])
    if magic != MAGIC:
        raise HandshakeError(Reason.NOT_MUSTER)
    if version != VERSION or reason == Reason.OTHER_VERSION:
        raise HandshakeError(Reason.OTHER_VERSION)
    transcript = hello + answer[: _HELLO.size]
    if not hmac.compare_digest(_mac(secret, b"server", transcript), answer[_HELLO.size :]):
        writer.write(bytes(MAC_BYTES))  # proves nothing, but lets the other side name us
        raise HandshakeError(Reason.WRONG_SECRET)
    writer.write(_mac(secret, b"client", transcript))
    last = await read_bytes(reader, 1 + MAC_BYTES)
    if last[0] != Reason.ACCEPTED:
        raise HandshakeError(Reason.WRONG_SECRET)
    if not hmac.compare_digest(_mac(secret, b"done", transcript), last[1:]):
        raise HandshakeError(Reason.WRONG_SECRET)
    return SessionKeys(
        role=role,
        send_key=_mac(secret, b"key client to server", transcript),
        receive_key=_mac(secret, b"key server to client", transcript),
        is_open=is_open,
    )


def greeting() -> bytes:
    """Return what a caller sends first if it only wants to know whether muster listens."""
    return _HELLO.pack(MAGIC, VERSION, Role.AGENT, 0, os.urandom(NONCE_BYTES))


async def answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secrets: tuple[bytes, bytes | None],
    first: bytes = b"",
) -> SessionKeys:
    """Run the handshake of the called side.

    `secrets` are the run's secret and, if allowed, the public key. `first` holds the caller's bytes
    that were read already.

    Raises:
        HandshakeError: The caller is not muster, has another version or another secret.
    """
    hello = first + await read_bytes(reader, len(MAGIC) - len(first))
    if hello != MAGIC:
        raise HandshakeError(Reason.NOT_MUSTER)
    hello += await read_bytes(reader, _HELLO.size - len(MAGIC))
    _, version, role, key, _ = _HELLO.unpack(hello)
    secret = secrets[key] if key in (0, 1) else None
    is_open = key == 1
    agreed = Reason.ACCEPTED if version == VERSION else Reason.OTHER_VERSION
    if secret is None:
        secret, agreed = secrets[0], Reason.WRONG_SECRET
    reply = _HELLO.pack(MAGIC, VERSION, agreed, key, os.urandom(NONCE_BYTES))
    transcript = hello + reply
    writer.write(reply + _mac(secret, b"server", transcript))
    if agreed is not Reason.ACCEPTED or role not in tuple(Role):
        raise HandshakeError(agreed or Reason.OTHER_VERSION)
    proof = await read_bytes(reader, MAC_BYTES)
    if not hmac.compare_digest(_mac(secret, b"client", transcript), proof):
        writer.write(bytes([Reason.WRONG_SECRET]) + bytes(MAC_BYTES))
        raise HandshakeError(Reason.WRONG_SECRET)
    writer.write(bytes([Reason.ACCEPTED]) + _mac(secret, b"done", transcript))
    return SessionKeys(
        role=Role(role),
        send_key=_mac(secret, b"key server to client", transcript),
        receive_key=_mac(secret, b"key client to server", transcript),
        is_open=is_open,
    )


def _mac(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, label + b"\0" + transcript, "sha256")


async def read_bytes(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    """Return the next bytes of the other side.

    Raises:
        HandshakeError: It sent fewer bytes and closed the connection.
    """
    try:
        return await reader.readexactly(num_bytes)
    except (asyncio.IncompleteReadError, OSError):
        raise HandshakeError(Reason.CLOSED) from None
