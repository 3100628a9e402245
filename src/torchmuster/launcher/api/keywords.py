"""The keywords of `launch`, `sweep` and `session`, read from the options of the commands."""

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from inspect import Parameter, Signature
from typing import Any

import click

from torchmuster.core import plugs
from torchmuster.core.cli.spelling import REMOVED
from torchmuster.core.model.text import did_you_mean
from torchmuster.launcher.api.failures import NotLaunchedError, merged

# Options that need a terminal, and what to use instead.
_OF_A_TERMINAL = {
    "debugpy": "`muster run --debugpy` prints the port for the editor",
    "pdb": "`muster run --pdb` opens it on a terminal",
    "detach": "launch returns at once, always",
    "dry_run": "`muster run --dry-run` shows it",
    "json": "the handle has the state, the results and the failure as values",
    "progress": "`run.follow()` shows the status",
    "tee": "`run.follow()` shows rank 0, and `run.logs(rank)` each",
    "stdin": "nobody types into a run in the background",
}
# Keywords that a session fixes for its runs (`multirun/cli/session.py`).
OF_A_SESSION = frozenset(
    {
        *("on", "hosts", "hostfile", "session", "here", "spares", "time", "queue", "partition"),
        *("account", "cpus_per_node", "gpus_per_node", "mem", "warn", "resubmit", "ship_env"),
        *("take_within", "inline"),
    }
)


_OF_VALUES = ("grid", "zip")  # `sweep` takes them as Python values


@functools.cache
def options(of: str = "launch") -> Mapping[str, click.Option]:
    """Map each keyword of `launch`, `sweep` or `session` to its option; aliases share one."""
    command = plugs.load(plugs.table("commands")[{"launch": "run"}.get(of, of)][2])
    if isinstance(command, click.Group):
        command = command.commands["start"]
    return {
        keyword: param
        for param in command.params
        if isinstance(param, click.Option) and not param.hidden
        for word in param.opts
        if word.startswith("--")
        if (keyword := word[2:].replace("-", "_")) not in _OF_A_TERMINAL
        if keyword not in _OF_VALUES
    }


def check(keywords: Mapping[str, object], what: str, of: str = "launch") -> None:
    """Refuse keywords that are not options; `what` names, for the message, what receives them.

    Raises:
        NotLaunchedError: With all unknown keywords.
    """
    _raise([_unknown(name, what, of) for name in keywords if name not in options(of)])


def check_session(keywords: Mapping[str, object]) -> None:
    """Refuse keywords that are not options of a session.

    Raises:
        NotLaunchedError: With all unknown keywords.
    """
    known = options("session")
    takes = f"session takes {', '.join(sorted(known))}"
    _raise(
        [
            NotLaunchedError(
                f"session has no parameter `{name}`", fix=did_you_mean(name, known, takes)
            )
            for name in keywords
            if name not in known
        ]
    )


def _unknown(name: str, what: str, of: str, more: Sequence[str] = ()) -> NotLaunchedError:
    if name in _OF_A_TERMINAL:
        return NotLaunchedError(f"`{name}` is no keyword of {of}", fix=_OF_A_TERMINAL[name])
    if (instead := REMOVED.get(f"muster {of} --{name.replace('_', '-')}")) is not None:
        return NotLaunchedError(f"the keyword `{name}` of {of} was removed", fix=instead)
    known = options(of)
    near = did_you_mean(name, [*more, *known], f"{of} takes {', '.join(sorted(known))}")
    return NotLaunchedError(f"neither {of} nor {what} has a parameter `{name}`", fix=near)


def split(
    keywords: Mapping[str, Any],
    function: Callable[..., Any],
    args: Sequence[Any],
    name: str,
    *,
    of: str = "launch",
    member: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords into those of launch (or sweep) and those of the function.

    Args:
        keywords: All keywords of the call.
        function: The function to call with the rest.
        args: The function's positional arguments.
        name: The function's name in messages.
        of: `launch` or `sweep`.
        member: The keywords that one member of a sweep adds.

    Raises:
        NotLaunchedError: A name is a keyword of both, or the function doesn't accept this call.
    """
    ours = {key: value for key, value in keywords.items() if key in options(of)}
    theirs = {key: value for key, value in keywords.items() if key not in options(of)}
    varied = member or {}
    try:
        signature = Signature.from_callable(function)
    except (TypeError, ValueError):  # a C function without a signature
        return ours, theirs
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    errors = [_meant_twice(key, name, of) for key in ours if key in named and key not in varied]
    errors += [_given_twice(key) for key in varied if key in theirs]
    if not takes_any:
        errors += [_unknown(key, f"`{name}`", of, named) for key in theirs if key not in named]
        errors += [_no_parameter(key, name, named) for key in varied if key not in named]
    _raise(errors)
    try:
        signature.bind(*args, **theirs, **varied)
    except TypeError as error:
        raise NotLaunchedError(
            f"`{name}` can't be called so: {error}", where=f"{name}{signature}"
        ) from None
    return ours, theirs


def _meant_twice(key: str, name: str, of: str) -> NotLaunchedError:
    return NotLaunchedError(
        f"`{key}` is a keyword of {of}, and `{name}` has a parameter of this name",
        where=f"{key}=",
        why=f"{of} would take it for `{options(of)[key].opts[0]}`",
        fix=f"{of}(functools.partial({name}, {key}=...), ...) passes it to the function",
    )


def _given_twice(key: str) -> NotLaunchedError:
    what = f"`{key}` varies, and is given as a keyword too"
    return NotLaunchedError(what, where=f"{key}=", fix="leave one of them out")


def _no_parameter(key: str, name: str, named: Sequence[str]) -> NotLaunchedError:
    fix = did_you_mean(key, named, f"its parameters: {', '.join(named) or 'none'}")
    what = f"`{name}` has no parameter `{key}`, which is to vary"
    return NotLaunchedError(what, where=f"{key}", fix=fix)


def _raise(errors: Sequence[NotLaunchedError]) -> None:
    if errors:
        raise merged(errors)


def for_keywords(error: NotLaunchedError, given: Mapping[str, object]) -> NotLaunchedError:
    """Turn a command's error about an option into one about the keyword that was given.

    Args:
        error: From `muster session start`, including its `others`.
        given: The keywords of the call.
    """
    option = (error.where or "").partition(" ")[0].partition("=")[0]
    known = options("session")
    keyword = next((name for name in given if option in known[name].opts), None)
    fix = error.fix
    if fix is not None and fix.endswith("--help"):
        fix = "docs/sessions.md has the keywords and their values"
    return NotLaunchedError(
        error.what,
        where=f"{keyword}={given[keyword]!r}" if keyword is not None else error.where,
        why=error.why,
        fix=fix,
        others=tuple(for_keywords(other, given) for other in error.others),
    )


def words(keywords: Mapping[str, Any], of: str = "launch") -> list[str]:
    """Return the command-line arguments for the keywords, without `env`.

    Args:
        keywords: Known options only.
        of: The function they belong to: `launch`, `sweep` or `session`.

    Raises:
        NotLaunchedError: With all values that their options can't have.
    """
    found: list[str] = []
    errors: list[NotLaunchedError] = []
    known = options(of)
    for name, value in keywords.items():
        option = known[name]
        if value is None or option.name == "set_env":
            continue
        # An option whose value is optional, as in `--ship-env[=PATH]`.
        if value is True and (option.metavar or "").startswith("[="):
            found.append(f"{_long(option)}=")
        elif option.is_flag != isinstance(value, bool):
            should = "True or False" if option.is_flag else "a value"
            errors.append(
                NotLaunchedError(f"`{name}` is {should}, not {value!r}", where=f"{name}={value!r}")
            )
        elif option.is_flag:
            found += [_long(option)] if value else []
        else:
            texts = _texts(value, several=option.multiple)
            found += [f"{_long(option)}={text}" for text in texts]
    _raise(errors)
    return found


def _long(option: click.Option) -> str:
    return next(word for word in option.opts if word.startswith("--"))


def _texts(value: Any, *, several: bool) -> list[str]:
    if isinstance(value, timedelta):
        return [f"{value.total_seconds():g}s"]
    if isinstance(value, list | tuple):
        texts = [str(one) for one in value]
        return texts if several else [",".join(texts)]
    return [str(value)]


def environment(keywords: Mapping[str, Any], of: str = "launch") -> dict[str, str]:
    """Return the variables that `env` (or `set_env`) sets in every worker.

    Raises:
        NotLaunchedError: The value is not a mapping of names to values.
    """
    found: dict[str, str] = {}
    for name, value in keywords.items():
        if options(of)[name].name != "set_env" or value is None:
            continue
        if not isinstance(value, Mapping):
            fix = f'{name}={{"NCCL_DEBUG": "INFO"}}'
            raise NotLaunchedError(
                f"`{name}` is a mapping of names to values", where=f"{name}={value!r}", fix=fix
            )
        found |= {str(key): str(text) for key, text in value.items()}
    return found
