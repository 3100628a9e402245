"""Pickle what travels between a client and its workers; name the variable that can't travel.

It also runs in the job's interpreter. It refuses objects that a pickler accepts but that would be
something else on the other side: tensors on a device, open files. For objects that the pickler
refuses (locks, sockets, clients of services) it finds the name.

A call file carries a function and its arguments from `torchmuster.launch` to the workers. It is one
line of JSON, then a pickle. The line is read first: it says which Python can read the pickle, and
where to find the client's modules. Readers first check the file's hash against the plan of the run.
"""

import functools
import inspect
import io
import json
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.model import codec
from torchmuster.errors import UsageError

MAX_CALL_BYTES = 64 << 20
_MAX_HEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHead:
    """The first line of a call file.

    Attributes:
        name: The function's name for messages.
        python: Minor version of the client's Python, e.g. `3.12`.
        cloudpickle: Version of cloudpickle, if the pickle needs it: the function or an argument
            travels by value.
        paths: Folders of the client's modules, relative to its working directory where possible.
        sources: Source text of functions that are in no file, such as notebook cells, by the file
            names in their tracebacks.
    """

    name: str
    python: str
    cloudpickle: str = ""
    paths: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)


def own_python() -> str:
    """Return the minor version of this interpreter; pickled functions only work in the same one."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def pack_call(head: CallHead, pickled: bytes) -> bytes:
    """Return the content of a call file."""
    return json.dumps(codec.to_plain(head), separators=(",", ":")).encode() + b"\n" + pickled


def split_call(data: bytes) -> tuple[CallHead, bytes]:
    """Return the first line of a call file and the pickle after it, unread.

    Raises:
        CodecError: It is not a call file.
    """
    line, newline, pickled = data.partition(b"\n")
    if not newline or len(line) > _MAX_HEAD_BYTES:
        raise codec.CodecError("its first line is no head of a call")
    try:
        return codec.from_plain(CallHead, json.loads(line)), pickled
    except (ValueError, RecursionError) as error:
        raise codec.CodecError(f"its first line is no head of a call: {error}") from None


_MAX_DEPTH = 8
_MAX_PARTS = 1000  # tried per object
_PROTOCOL = 5
_WORDS = {
    "_thread.lock": "a lock",
    "_thread.RLock": "a lock",
    "socket": "a socket",
    "socket.socket": "a socket",
    "SSLContext": "a connection",
    "ssl.SSLContext": "a connection",
    "generator": "a generator",
    "coroutine": "a coroutine",
    "sqlite3.Connection": "a connection to a database",
    "_io.TextIOWrapper": "an open file",
}

# Classes that some pickler accepts, or refuses with internal details: their state belongs to this
# process. Keyed by the top-level package, since packages move classes about. Data classes of the
# same packages (tables, answers, file systems of fsspec) may travel.
_CLIENTS: dict[str, tuple[frozenset[str], str]] = {
    "aiohttp": (frozenset({"ClientSession"}), "an HTTP session"),
    "azure": (frozenset({"BlobServiceClient", "ContainerClient", "BlobClient"}), "a client"),
    "boto3": (frozenset({"Session", "ServiceResource"}), "a client"),
    "botocore": (frozenset({"BaseClient", "Session"}), "a client"),
    "clickhouse_connect": (frozenset({"Client"}), "a client"),
    "duckdb": (frozenset({"DuckDBPyConnection"}), "a connection to a database"),
    "google": (frozenset({"Client"}), "a client"),
    "grpc": (frozenset({"Channel"}), "a connection"),
    "h5py": (frozenset({"File"}), "an open file"),
    "httpx": (frozenset({"Client", "AsyncClient"}), "an HTTP session"),
    "kafka": (frozenset({"KafkaProducer", "KafkaConsumer"}), "a client"),
    "lmdb": (frozenset({"Environment"}), "an open file"),
    "mlflow": (frozenset({"MlflowClient"}), "a client"),
    "paramiko": (frozenset({"SSHClient", "Transport"}), "a connection"),
    "psycopg": (frozenset({"Connection", "AsyncConnection"}), "a connection to a database"),
    "psycopg2": (frozenset({"connection"}), "a connection to a database"),
    "pymongo": (frozenset({"MongoClient"}), "a connection to a database"),
    "pymysql": (frozenset({"Connection"}), "a connection to a database"),
    "redis": (frozenset({"Redis", "ConnectionPool"}), "a connection to a database"),
    "requests": (frozenset({"Session"}), "an HTTP session"),
    "sqlalchemy": (
        frozenset({"Engine", "Connection", "Session", "AsyncEngine"}),
        "a connection to a database",
    ),
    "urllib3": (frozenset({"PoolManager", "HTTPConnectionPool"}), "an HTTP session"),
    "wandb": (frozenset({"Run"}), "a client"),
    "zmq": (frozenset({"Context", "Socket"}), "a socket"),
}


class CarryError(UsageError):
    """A value can't travel; another attempt would fail in the same way."""

    muster_final = True


class _RefusedError(Exception):
    """The pickler met an object that must not travel; the text says what it is."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(what)
        self.why = why or "the other side has another memory, other devices and other open files"


class _TooLargeError(Exception):
    """The pickle is longer than allowed."""


class _Sink:
    """A file object that accepts a limited number of bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self.parts: list[bytes] = []
        self._left = limit_bytes

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._left -= len(piece)
        if self._left < 0:
            raise _TooLargeError
        self.parts.append(piece)
        return len(piece)


class Named:
    """A value with names for its parts, for messages; only the value is pickled."""

    def __init__(self, value: Any, parts: dict[str, Any]) -> None:
        self.value, self.parts = value, parts


def pack_value(value: Any, what: str, name: str, limit_bytes: int = sys.maxsize) -> bytes:
    """Return the pickle of a value.

    Args:
        value: The value.
        what: Its name in a sentence: "the function `train`".
        name: Prefix for the names of its parts, e.g. `value`; empty if the parts have names.
        limit_bytes: Largest pickle; unlimited for values that stay in the run directory.

    Raises:
        CarryError: It contains something that can't travel, or is too large.
    """
    try:
        return _pickled(value, limit_bytes)
    except _TooLargeError:
        largest = _largest(name, value, limit_bytes)
        raise CarryError(
            f"{what} is larger than {limit_bytes >> 20} MiB",
            where=f"`{largest}`" if largest else None,
            why="it would travel between your client and every worker through memory",
            fix="leave it in a file that both sides see, and pass its path",
        ) from None
    except Exception as error:  # noqa: BLE001 - a `__reduce__` may raise anything
        path, culprit, why = _find(name, value, error, 0)
        raise CarryError(
            f"{what} can't travel: `{path}` is {_words_for(culprit, why)}"
            if path
            else f"{what} can't travel: it is {_words_for(culprit, why)}",
            where=f"`{path}`" if path else None,
            why=_in_words(why),
            fix=_fix_for(culprit),
        ) from None


def _pickled(value: Any, limit_bytes: int) -> bytes:
    sink = _Sink(limit_bytes)
    _pickler()(sink, _PROTOCOL).dump(value.value if isinstance(value, Named) else value)
    return b"".join(sink.parts)


def _pickler() -> Any:
    """Return the pickler class: cloudpickle's if installed, since it also handles notebook code."""
    try:
        import cloudpickle
    except ImportError:
        return _checked(pickle.Pickler)
    return _checked(cloudpickle.Pickler)


@functools.cache
def _checked(base: Any) -> Any:
    class Checked(base):  # type: ignore[misc]  # one of two classes
        def reducer_override(self, value: Any) -> Any:
            for name in ("stdout", "stderr"):
                if value is getattr(sys, name):
                    return getattr, (sys, name)  # the other side has its own
            _check(value)
            if isinstance(value, types.CodeType) and types.CodeType in self.dispatch_table:
                make, args = self.dispatch_table[types.CodeType](value)
                # cloudpickle 3.1.3 replaces all file names: tracebacks and debuggers would show no
                # lines.
                return make, tuple(value.co_filename if a == "<dynamic-code>" else a for a in args)
            override = getattr(super(), "reducer_override", None)
            return override(value) if override is not None else NotImplemented

    return Checked


def _check(value: Any) -> None:
    if _is_tensor(value):
        device = value.device
        if device.type not in ("cpu", "meta"):
            raise _RefusedError(f"a tensor on {device}")
    if isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO):
        raise _RefusedError("an open file")
    client = _client_of(type(value))  # type: ignore[arg-type]  # classes can be hashed
    if client is not None:
        why = "its connections and its login are this process's, and could not be told from new ones there"
        raise _RefusedError(client, why)


@functools.cache
def _client_of(kind: Any) -> str | None:
    """Return a description of a client of a service by its class; None for all other classes."""
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        names, words = _CLIENTS.get(root, (frozenset(), ""))
        if base.__qualname__ in names:
            return f"{words} of `{root}`"
    return None


def _is_tensor(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


# Find the culprit.


def _find(path: str, value: Any, error: Exception, depth: int) -> tuple[str, Any, Exception]:
    """Return the innermost part that can't be pickled, its name and the reason."""
    client = _client_of(type(value))  # type: ignore[arg-type]  # classes can be hashed
    if depth < _MAX_DEPTH and client is None:  # its inside is not the user's
        for name, part in _parts(path, value):
            try:
                _pickled(part, sys.maxsize)
            except Exception as inner:  # noqa: BLE001 - the same
                return _find(name, part, inner, depth + 1)
    return path, value, error


def _largest(path: str, value: Any, limit_bytes: int) -> str:
    """Return the name of the largest part, or the value's own name if it has no parts."""
    sizes: list[tuple[int, str]] = []
    for name, part in _parts(path, value):
        try:
            sizes.append((len(_pickled(part, limit_bytes)), name))
        except Exception:  # noqa: BLE001 - too large alone, or not to be pickled alone
            sizes.append((limit_bytes, name))
    return max(sizes, default=(0, path))[1]


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, by the names that its author gave them."""
    for number, (name, part) in enumerate(_all_parts(path, value)):
        if number == _MAX_PARTS:
            return
        yield name, part


def _all_parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case Named():
            yield from value.parts.items()
        case dict():
            yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
        case list() | tuple():
            yield from ((f"{path}[{number}]", part) for number, part in enumerate(value))
        case functools.partial():
            yield from _all_parts(path, value.func)
            yield from ((f"argument {number}", part) for number, part in enumerate(value.args))
            yield from value.keywords.items()
        case types.MethodType():
            yield "self", value.__self__
        case types.FunctionType():
            yield from _variables(value)
        case _:
            held = getattr(value, "__dict__", None)
            if isinstance(held, dict) and not isinstance(value, type | types.ModuleType):
                yield from (
                    (f"{path}.{name}" if path else name, part) for name, part in held.items()
                )


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function captures or reads, and its parameters' defaults."""
    try:
        found = inspect.getclosurevars(function)
    except ValueError:  # a variable that has no value yet
        return
    yield from found.nonlocals.items()
    for name, part in found.globals.items():
        if not isinstance(part, types.ModuleType):
            yield name, part
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not parameter.empty:
            yield parameter.name, parameter.default


def _in_words(error: Exception) -> str:
    if isinstance(error, _RefusedError):
        return error.why
    return f"pickle says: {error}" if str(error) else f"pickle raised {type(error).__name__}"


def _words_for(culprit: Any, error: Exception) -> str:
    if isinstance(error, _RefusedError):
        return str(error)
    kind = type(culprit)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    full = f"{module}{kind.__qualname__}"
    known = _WORDS.get(full) or next(
        (words for name, words in _WORDS.items() if f"'{name}' object" in str(error)), None
    )
    if known is not None and _WORDS.get(full) == known:
        return known
    holds = f", which holds {known}" if known else ""
    return f"a `{full}`{holds}"


def _fix_for(culprit: Any) -> str:
    if _is_tensor(culprit):
        return "send it from the CPU: `.cpu()`, or `.item()` of one number"
    if isinstance(culprit, types.GeneratorType):
        return "send what it yields, `list(...)`, or make it inside the function that needs it"
    return "make it inside the function, or pass what it is made from: a path, an address, a number"


def unpack(pickled: bytes, refuse: Callable[[str], Exception]) -> Any:
    """Load a verified pickle; `refuse` makes the error for one that needs a missing module."""
    try:
        return pickle.loads(pickled)  # its hash has been compared with that of the run's record
    except ModuleNotFoundError as error:
        raise refuse(error.name or str(error)) from error
