"""What an exception means by its type and its message: its kind, its role in the story, what it names."""

import errno
import re
from collections.abc import Mapping

from torchmuster.diagnose.explain.catalogue.entry import TOLD
from torchmuster.diagnose.explain.events import LineRole
from torchmuster.diagnose.explain.reading.chains import FETCHES
from torchmuster.diagnose.explain.reading.patterns import Meaning, match
from torchmuster.diagnose.explain.reading.sentences import of_a_file
from torchmuster.model.failure import ECHOES

# Types in which torch, Gloo and NCCL tell of other ranks, and the socket's own.
_SPEAKS_FOR_TORCH = re.compile(
    r"(?:torch\.|RuntimeError$|Dist|Rendezvous|Connection\w*Error$|BrokenPipeError$|TimeoutError$|OSError$|EOFError$"
    r"|(?:ValueError|ImportError|ModuleNotFoundError)$|socket\.|c10|std::|gloo::|SignalException|ChildFailed|KeyboardInterrupt)"
)
# What a program says in its own words is no word of the scheduler, and no state of the launcher.
_NO_MEANING_IN_A_MESSAGE = frozenset(
    {
        *("time_limit", "preempted", "node_failed", "cancelled", "oom_proof", "evicted", "image"),
        "pbs_killed",
        *("task_exit", "teardown", "not_finite", "killed_line", "signal_received", "exit_code"),
        *("root_cause_table", "table_row", "launch_config", "launch_line", "variable", "world"),
        *("progress", "success", "no_command", "launch_failed", "bad_arguments", "module_load"),
        *("last_work", "nccl_using", "hosts_store", "rdzv_complete", "child_failed", "set_by_user"),
        *("raised_line", "error_line"),
    }
)
_ENDED_BY_OTHERS = frozenset({"SignalException", "ChildFailedError", "KeyboardInterrupt"})
# The traceback of what it was follows.
_ENDED_BY_OTHERS |= {"ProcessRaisedException", "ExceptionGroup", "BaseExceptionGroup"}
_DIED = re.compile(r"died with <Signals\.(SIG\w+)")
_ENDED = re.compile(r"terminated with (?:signal (?P<other>SIG\w+)|exit code (?P<code>\d+))")
_GOT_SIGNAL = re.compile(r"got signal: (\d+)")
_NUMBERED_TYPES = {"FileNotFoundError": errno.ENOENT, "PermissionError": errno.EACCES}
_OF_NETWORKS = (
    *(errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ECONNREFUSED),
    *(errno.ECONNRESET, errno.EPIPE),
)
_HEADING = re.compile(r":$|^$|\b\d+ (?:\w+ )?(?:errors?|problems?)\b|^Error\(s\) in ")


def meaning_of(type_name: str, message: str) -> tuple[str, LineRole, Mapping[str, str]]:
    """Return what an exception is: its kind, its role and what it names."""
    if type_name.endswith("SignalException") and (got := _GOT_SIGNAL.search(message)) is not None:
        return "signal_received", LineRole.CONTEXT, {"signum": got[1]}
    if type_name.endswith("CalledProcessError") and (died := _DIED.search(message)) is not None:
        return "signal_received", LineRole.CONTEXT, {"other": died[1]}
    words = f"{type_name}: {message}" if message else type_name
    found = match(words, is_raised=True)
    role = LineRole.ECHO if ECHOES.search(words) else LineRole.CAUSE
    if not _SPEAKS_FOR_TORCH.match(type_name):
        role = LineRole.CAUSE  # a client of something else: its lost connections are its own
        if found is not None and found.role is LineRole.ECHO:
            found = None
    if found is not None and FETCHES.match(type_name) and _is_of_network(found):
        found = None  # what fetches says more than the socket beneath it
    if found is not None and found.kind.startswith(TOLD):
        return "exception", found.role, {**found.fields, "told": found.kind}
    if found is not None and found.kind not in _NO_MEANING_IN_A_MESSAGE:
        return found.kind, found.role, found.fields
    if type_name.endswith("ProcessExitedException") and (end := _ENDED.search(message)) is not None:
        kind = "signal_received" if end["other"] else "exit_code"
        return (
            kind,
            LineRole.CONTEXT,
            {name: word for name, word in end.groupdict().items() if word},
        )
    if type_name.rpartition(".")[2] in _ENDED_BY_OTHERS:
        return "exception", LineRole.ECHO, {}
    more = _as_errno(type_name, message)
    if more:
        return "errno", LineRole.CAUSE, more
    return "exception", role if type_name else LineRole.CONTEXT, {}


def _is_of_network(found: Meaning) -> bool:
    number = found.fields.get("errno", "0")
    return found.kind == "no_name" or (
        found.kind == "errno" and number.isdigit() and int(number) in _OF_NETWORKS
    )


def _as_errno(type_name: str, message: str) -> dict[str, str]:
    """Return the error number of the kernel that a message ends with or a type stands for."""
    number = of_a_file(message)
    if not number and not message.startswith("Caught "):
        number = _NUMBERED_TYPES.get(type_name, 0)
    return {"errno": str(number)} if number else {}


def opens_a_list(message: str) -> bool:
    """Say whether the first line of a message is only a heading: what it is stands below."""
    return _HEADING.search(message) is not None
