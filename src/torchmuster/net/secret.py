"""The secret of a run: 32 random bytes in a 0600 file. Never in argv, environment or logs."""

import os
import secrets

from torchmuster.errors import RunDirectoryError, UsageError

SECRET_BYTES = 32


def new_secret() -> bytes:
    """Return fresh random bytes."""
    return secrets.token_bytes(SECRET_BYTES)


def write_secret(path: str, secret: bytes) -> None:
    """Write a secret to a new file that only its owner can read; it appears complete.

    Raises:
        FileExistsError: Another process has made it first.
    """
    temporary = f"{path}.{os.getpid()}-{secrets.token_hex(4)}"
    _write_new(temporary, secret)
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        _write_new(path, secret)
    finally:
        os.unlink(temporary)


def _write_new(path: str, secret: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secret.hex() + "\n")


def read_secret(path: str) -> bytes:
    """Return the secret in a file.

    Raises:
        RunDirectoryError: The file can't be read.
        UsageError: It is malformed or readable by others.
    """
    try:
        with open(path, errors="replace") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(1024).strip()
    except OSError as error:
        raise RunDirectoryError(
            "the secret can't be read", where=path, why=error.strerror
        ) from error
    if mode & 0o077:
        raise UsageError(
            "the secret can be read by others",
            where=path,
            why=f"its mode is {mode & 0o777:04o}",
            fix=f"chmod 600 {path}",
        )
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) < 16:
        raise UsageError(
            "the secret is not at least 16 bytes in hexadecimal digits",
            where=path,
            fix=f"(umask 077; openssl rand -hex 32 > {path})",
        )
    return secret
