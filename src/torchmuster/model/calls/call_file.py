"""The call file: a function with its arguments, on its way from `torchmuster.launch` to the workers.

One line of JSON, then a pickle. The line is read first: it says which Python can read the pickle, and where that finds the
modules of the client. Who reads a call file has checked its hash, which stands in the plan of the run.
"""

import json
import sys
from dataclasses import dataclass, field

from torchmuster.model import codec
from torchmuster.model.plan import FunctionCall

MAX_CALL_BYTES = 64 << 20
_MAX_HEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHead:
    """The first line.

    Attributes:
        name: The function, as messages call it.
        python: Minor version of the client's Python, e.g. `3.12`.
        cloudpickle: Its version, where the pickle needs it: the function, or an argument, travels by value.
        paths: Folders of modules of the client, relative to its working directory where that is possible.
        sources: The text behind functions that no file has, by the names in their tracebacks: cells of a notebook.
    """

    name: str
    python: str
    cloudpickle: str = ""
    paths: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """What `torchmuster.launch` tells `muster run`, and `torchmuster.sweep` tells `muster sweep`, in a file of mode 0600, because others can read command lines.

    Attributes:
        call: Of a function; None of a script.
        args: Of a script.
        environment: What `env=` sets in every worker.
        names: Of a sweep, what varies.
        members: The values of each member as texts, in the order of `names`.
    """

    call: FunctionCall | None = None
    args: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    members: tuple[tuple[str, ...], ...] = ()


def own_python() -> str:
    """Return the minor version of this interpreter: pickles of functions fit the same one only."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def pack_call(head: CallHead, pickled: bytes) -> bytes:
    """Return the content of a call file."""
    return json.dumps(codec.to_plain(head), separators=(",", ":")).encode() + b"\n" + pickled


def split_call(data: bytes) -> tuple[CallHead, bytes]:
    """Return the first line of a call file, and the pickle behind it, which is not read.

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
