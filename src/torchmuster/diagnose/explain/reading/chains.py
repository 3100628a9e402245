"""Chains of exceptions: whether the earlier one or the one raised while handling it is the cause.

Tested with provoked failures: an exception that is raised *from* another mostly says that something
failed, and the one beneath says what. A failed look-up (a key, an attribute, an optional import) is
a question that the program asked; what follows from the answer is the failure. What breaks in a
handler or in the clean-up after a real failure is not the failure.
"""

import re
from collections.abc import Sequence

from torchmuster.diagnose.explain.catalogue.entry import MESSAGE_PREFIX
from torchmuster.diagnose.explain.events import LineRole, LogEvent

# Libraries that fetch: their own message says more than the socket's error beneath it.
FETCHES = re.compile(
    r"^(?:requests|urllib3|urllib|httpx|aiohttp|httpcore|huggingface_hub|botocore|boto3|google|azure|gcsfs|s3fs)\."
    r"|^(?:URLError|HTTPError|SSLError|MaxRetryError|ConnectTimeout|LocalEntryNotFoundError)(?=:|$)"
)
STANDARD_LIBRARY = "Python"
_OF_SOCKETS = re.compile(
    r"(?:Connection\w*|BrokenPipe|Timeout|OS|EOF)Error$|socket\.|TimeoutError$"
)
_DIRECT = "The above exception was the direct cause"
BETWEEN = re.compile(r"^(During handling of the above|The above exception was the direct cause)")
# Functions that fail during the clean-up after a failure: the earlier failure is the cause.
_CLEANS_UP = frozenset(
    {"__exit__", "__aexit__", "__del__", "close", "cleanup", "destroy_process_group"}
)
_LOOK_UPS = frozenset({"KeyError", "IndexError", "AttributeError", "StopIteration", "Empty"})
_IMPORTS = frozenset({"ImportError", "ModuleNotFoundError"})
_NO_NUMBER = re.compile(r"invalid literal for int\(\)|could not convert string to float")
# Types whose names say what happened, whatever the message.
_SAY_ALL = frozenset({"MemoryError", "RecursionError", "KeyboardInterrupt", "SystemExit"})
# Mistakes in the code itself, as in handlers that have never run before.
_ACCIDENTS = frozenset({"AttributeError", "NameError", "UnboundLocalError", "TypeError"})
_OF_A_CHILD = re.compile(r"CalledProcessError$")
_NAMES_SOMETHING = re.compile(r"[/\\\d]|['\"`]\w|\w_\w|\w\.\w")
_FEW_WORDS = 4


def only_wraps(
    event: LogEvent, beneath: LogEvent, *, between: str, caught_in: str, code: Sequence[str]
) -> bool:
    """Return whether an exception only passes on the one beneath it, which then tells the cause.

    Args:
        event: The later exception.
        beneath: The earlier exception.
        between: The sentence that joins them.
        caught_in: The function that caught the earlier one.
        code: The lines below the last frame of the later one.
    """
    if event.kind != "exception" or FETCHES.match(event.get("type")):
        return False
    if beneath.role is LineRole.ECHO and not _is_of_torch(beneath):
        return False
    if event.get("raised_in") in _CLEANS_UP:
        return True
    is_direct = between.startswith(_DIRECT)
    if _OF_A_CHILD.search(beneath.get("type")) or _explains(event, beneath, is_direct=is_direct):
        return False
    if is_direct:
        return True
    if event.get("raised_in") == caught_in and code and code[0].strip().startswith("raise"):
        return True
    return _broke_in_the_handler(event, beneath)


def was_only_a_question(event: LogEvent, beneath: LogEvent) -> bool:
    """Return whether the earlier exception was the program's question, and so is no failure."""
    if beneath.kind == "exception" or FETCHES.match(event.get("type")):
        return True
    name = _name(beneath)
    if name == "FileNotFoundError":
        return _name(event) not in _ACCIDENTS
    return name in _LOOK_UPS or name in _IMPORTS


def _broke_in_the_handler(event: LogEvent, beneath: LogEvent) -> bool:
    """Return whether a handler of a real failure broke, or says less than what it handled."""
    if _name(beneath) in _LOOK_UPS or _NO_NUMBER.search(beneath.get("message")):
        return False
    if _name(event) in _ACCIDENTS:
        return True
    is_known = beneath.get("told").startswith(MESSAGE_PREFIX) and _name(beneath) not in _IMPORTS
    return is_known and not event.get("told")


def _explains(event: LogEvent, beneath: LogEvent, *, is_direct: bool) -> bool:
    """Return whether an exception says more than the look-up or attempt beneath it."""
    if _NO_NUMBER.search(beneath.get("message")):
        return True
    if _name(beneath) not in _LOOK_UPS:
        is_attempt = not is_direct and beneath.kind == "exception" and not beneath.get("told")
        is_attempt = is_attempt and _name(beneath) not in _SAY_ALL
        return is_attempt and not _names_something(beneath) and _names_something(event)
    word, message = beneath.get("message").strip("'\""), event.get("message")
    if word and word in message and len(message) > len(word) + 12:
        return True
    return _names_something(event)


def _names_something(event: LogEvent) -> bool:
    """Return whether a message is a sentence that names a file, a number or an identifier."""
    message = event.get("message")
    return len(message.split()) >= _FEW_WORDS and _NAMES_SOMETHING.search(message) is not None


def _name(event: LogEvent) -> str:
    return event.get("type").rpartition(".")[2]


def _is_of_torch(event: LogEvent) -> bool:
    """Return whether a lost connection is between ranks; other clients' have their own library."""
    return event.get("library") in ("", "torch", STANDARD_LIBRARY) or not _OF_SOCKETS.match(
        event.get("type")
    )
