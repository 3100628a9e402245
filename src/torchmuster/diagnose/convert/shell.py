"""Parses a shell script that starts torchrun, for `muster convert`: its request, or why it is not supported.

Only known commands are accepted. Everything that a training task would not do is a reason to refuse.
"""

import argparse
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchmuster.errors import UsageError
from torchmuster.spec.torchrun import make_parser

_JINJA = re.compile(r"\{\{.*?\}\}|\{%.*?%\}")
_MARK = re.compile("\ue000(\\d+)\ue001")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"python[\d.]*")
_MODULES = ("torch.distributed.run", "torch.distributed.launch")
LAUNCHER = re.compile(
    r"(?<![\w./-])(?:[\w./-]*/)?torchrun(?![\w./-])|torch\.distributed\.(?:run|launch)\b"
)
_PRINTS = frozenset({"echo", "set", "date", "hostname", "pwd", "nvidia-smi", "true", ":"})
_BARRIERS = ("osmo_barrier.py",)
# What the launcher itself sets for every worker: a value from outside never reaches the script.
SET_BY_LAUNCHER = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"})
_TAKEN = frozenset(
    {
        "nnodes",
        "nproc_per_node",
        "max_restarts",
        "training_script",
        "training_script_args",
        "node_rank",
        "master_addr",
        "master_port",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "rdzv_conf",
        "standalone",
        "local_addr",
        "monitor_interval",
        "start_method",
        "run_path",
    }
)
_NOT_TAKEN = {
    "module": "a training task starts a file, not a module",
    "no_python": "a training task starts a Python script",
    "log_dir": "muster always keeps one log for each rank",
    "redirects": "muster always keeps one log for each rank",
    "tee": "muster always keeps one log for each rank",
}


class CantConvertError(Exception):
    """Why a script can't become a training task.

    Attributes:
        line: Its line in the script, from 0.
    """

    def __init__(
        self, what: str, line: int = 0, fix: str | None = None, why: str | None = None
    ) -> None:
        super().__init__(what)
        self.what, self.line, self.fix, self.why = what, line, fix, why


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptLaunch:
    """The request of a script with one torchrun line; texts may contain `{{...}}`.

    Attributes:
        node_rank: None if not given.
        max_restarts: None if not given.
        environment: Assignments before the command, and exports.
        folders: What `mkdir -p` makes: `(line, path)`.
        barriers: Files of a barrier that waits for the other tasks: `(line, path)`.
        folder: The folder of the last `cd`, None without one.
        dropped: Lines without an effect for a training task: `(line, text)`.
        line: The line of torchrun in the script, from 0.
    """

    nodes: str
    nproc_per_node: str
    node_rank: str | None
    script: str
    args: tuple[str, ...]
    max_restarts: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    folders: tuple[tuple[int, str], ...] = ()
    barriers: tuple[tuple[int, str], ...] = ()
    folder: str | None = None
    dropped: tuple[tuple[int, str], ...] = ()
    line: int = 0


def read_script(text: str) -> ScriptLaunch:
    """Return the request of a shell script.

    Raises:
        CantConvertError: It does something that a training task does not do.
    """
    if (statement := re.search(r"\{[%#]", text)) is not None:
        row = text.count("\n", 0, statement.start())
        what = f"`{_short(text.split(chr(10))[row])}` changes the script by a template statement"
        raise CantConvertError(what, row, "write the line without `{% ... %}`")
    masked, restore = mask(text)
    reader = _Reader(restore)
    for number, line in _logical_lines(masked):
        reader.take(number, line)
    return reader.finish()


def read_words(words: Sequence[str]) -> ScriptLaunch:
    """Return the request of a command without a shell.

    Raises:
        CantConvertError: It is no torchrun line, or one that a training task can't follow.
    """
    reader = _Reader(lambda text: text)
    reader.command(0, list(words), " ".join(words), quoted=True)
    return reader.finish()


def mask(text: str) -> tuple[str, Callable[[str], str]]:
    """Return the text with one word for each `{{...}}` and `{%...%}`, and the mapping that restores them."""
    hidden: list[str] = []

    def hide(match: re.Match[str]) -> str:
        hidden.append(match[0])
        return f"\ue000{len(hidden) - 1}\ue001"

    def restore(masked: str) -> str:
        return _MARK.sub(lambda match: hidden[int(match[1])], masked)

    return _JINJA.sub(hide, text), restore


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 70 else f"{text[:67]}..."


def _without_comment(text: str) -> str:
    """Remove a comment: a `#` at the beginning of a word, outside quotes."""
    quote = ""
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and text[index - 1 : index] in ("", " ", "\t", ";"):
            return text[:index]
    return text


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Return (number, line) with continuations joined."""
    found: list[tuple[int, str]] = []
    begun: tuple[int, str] | None = None
    for number, line in enumerate(text.split("\n")):
        first, before = begun or (number, "")
        if line.rstrip().endswith("\\") and not line.lstrip().startswith("#"):
            begun = first, f"{before}{line.rstrip()[:-1]} "
            continue
        found.append((first, before + line))
        begun = None
    return [*found, begun] if begun is not None else found


class _Reader:
    """Takes the lines of a script one by one."""

    def __init__(self, restore: Callable[[str], str]) -> None:
        self._restore = restore
        self._launch: tuple[int, list[str], bool, bool] | None = None
        self._environment: dict[str, str] = {}
        self._folders: list[tuple[int, str]] = []
        self._barriers: list[tuple[int, str]] = []
        self._dropped: list[tuple[int, str]] = []
        self._folder: str | None = None

    def take(self, number: int, line: str) -> None:
        """Read one line: commands with `&&` and `;` between them."""
        text = line.strip()
        if not text or text.startswith("#"):
            return
        match = _ASSIGNMENT.fullmatch(text)
        if match is not None and match[2].startswith("$(") and match[2].endswith(")"):
            return  # what it holds is refused where it is used
        for words in self._commands(number, text):
            self.command(number, words, text)

    def _commands(self, number: int, text: str) -> list[list[str]]:
        lexer = shlex.shlex(_without_comment(text), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        lexer.commenters = ""
        found: list[list[str]] = [[]]
        try:
            for word in lexer:
                if word in ("&&", ";"):
                    found.append([])
                elif word and set(word) <= set("();<>|&"):
                    why = f"`{word}` joins commands or moves their output"
                    raise self._cannot(number, text, why)
                else:
                    found[-1].append(word)
        except ValueError as error:
            why = f"this shell line is not understood: {error}"
            raise self._cannot(number, text, why) from error
        return [words for words in found if words]

    def command(self, number: int, words: list[str], text: str, *, quoted: bool = False) -> None:
        """Read one command; `quoted` when no shell would see its `$`."""
        if words[0] in ("exec", "env"):
            words = words[1:]
        given: list[tuple[str, str]] = []
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            given.append((match[1], match[2]))
            words = words[1:]
        if not words:
            return
        if (launcher := _launcher(words)) is not None:
            if self._launch is not None:
                raise self._cannot(number, text, "there is more than one torchrun line")
            self._set(number, given, text)
            rest, is_launch = launcher
            self._launch = number, rest, is_launch, quoted
            return
        self._other(number, words, text)

    def _other(self, number: int, words: list[str], text: str) -> None:
        name = os.path.basename(words[0])
        if name == "export" and all(_ASSIGNMENT.fullmatch(word) for word in words[1:]):
            pairs = [word.partition("=") for word in words[1:]]
            self._set(number, [(key, value) for key, _, value in pairs], text)
        elif name == "mkdir" and self._launch is None:
            self._folders += [
                (number, self._restore(w)) for w in words[1:] if not w.startswith("-")
            ]
        elif name == "cd" and self._launch is None and len(words) == 2:
            self._folder = os.path.join(self._folder or "", self._plain(number, words[1], text))
            self._dropped.append((number, self._restore(text)))
        elif name in _PRINTS:
            self._dropped.append((number, self._restore(text)))
        elif _is_barrier(words) and self._launch is None:
            script = words[1] if _PYTHON.fullmatch(name) else words[0]
            self._barriers.append((number, self._restore(script)))
        else:
            where = "before" if self._launch is None else "after"
            raise self._cannot(number, text, f"nothing would run it {where} the training")

    def _set(self, number: int, pairs: Sequence[tuple[str, str]], text: str) -> None:
        for name, value in pairs:
            if name not in SET_BY_LAUNCHER:
                self._environment[name] = self._plain(number, value, text)

    def _plain(self, number: int, word: str, text: str) -> str:
        """Return a word that the shell does not change."""
        if re.search(r"[$`]|^~|(?<!\\)[*?]", word):
            raise self._cannot(number, text, f"the shell expands `{self._restore(word)}`")
        return self._restore(word)

    def _cannot(self, number: int, text: str, why: str) -> CantConvertError:
        fix = "move it into the training script, or into a task of its own"
        if "torchrun" in text or "torch.distributed" in text:
            fix = "write the torchrun line plainly"
        shown = _short(self._restore(text))
        return CantConvertError(f"`{shown}` can't be part of a training task", number, fix, why)

    def finish(self) -> ScriptLaunch:
        """Return the complete request.

        Raises:
            CantConvertError: There is no torchrun line, or one with options that can't be kept.
        """
        if self._launch is None:
            raise CantConvertError("there is no torchrun line in it")
        number, words, is_launch, quoted = self._launch
        given = self._options(number, words, is_launch=is_launch)
        text = "torchrun " + " ".join(words)

        def plain(word: str) -> str:
            return self._restore(word) if quoted else self._plain(number, word, text)

        own = words[: len(words) - len(given.training_script_args) - 1]
        restarts = given.max_restarts if _is_given(own, "max", "restarts") else None
        ranked = _is_given(own, "node", "rank")
        return ScriptLaunch(
            nodes="1" if given.standalone or given.nnodes == "1:1" else plain(given.nnodes),
            nproc_per_node=plain(given.nproc_per_node),
            node_rank=plain(given.node_rank) if ranked else None,
            script=plain(given.training_script),
            args=tuple(plain(word) for word in given.training_script_args),
            max_restarts=None if restarts is None else plain(restarts),
            environment=dict(self._environment),
            folders=tuple(self._folders),
            barriers=tuple(self._barriers),
            folder=self._folder,
            dropped=tuple(self._dropped),
            line=number,
        )

    def _options(self, number: int, words: list[str], *, is_launch: bool) -> argparse.Namespace:
        parser = make_parser({})
        if is_launch:
            words = self._without_use_env(number, words)
        try:
            given = parser.parse_args(words)
        except UsageError as error:
            raise CantConvertError(error.what, number, error.fix) from error
        for name, value in vars(given).items():
            if name in _TAKEN or value == parser.get_default(name):
                continue
            why = _NOT_TAKEN.get(name, "a training task has no such option")
            option = f"--{name.replace('_', '-')}"
            raise CantConvertError(f"`{option}` can't be kept", number, f"leave {option} out", why)
        return given

    def _without_use_env(self, number: int, words: list[str]) -> list[str]:
        """torch.distributed.launch gives scripts `--local-rank` unless it is told not to."""
        for spelling in ("--use-env", "--use_env"):
            if spelling in words:
                return [word for word in words if word != spelling]
        why = "it passes the argument `--local-rank` to the script, muster does not"
        fix = "let the script read LOCAL_RANK from its environment, and add --use-env"
        raise CantConvertError(
            "torch.distributed.launch is used without --use-env", number, fix, why
        )


def _launcher(words: Sequence[str]) -> tuple[list[str], bool] | None:
    """Return the words after the launcher, and whether it is torch.distributed.launch."""
    name = os.path.basename(words[0])
    if name == "torchrun":
        return list(words[1:]), False
    if not _PYTHON.fullmatch(name):
        return None
    rest = [word for word in words[1:3] if word == "-u"]
    module = list(words[1 + len(rest) :])
    if len(module) > 1 and module[0] == "-m" and module[1] in _MODULES:
        return module[2:], module[1].endswith("launch")
    return None


def _is_barrier(words: Sequence[str]) -> bool:
    names = [os.path.basename(word) for word in words[:2]]
    if names[0] in _BARRIERS or list(words[:2]) == ["muster", "barrier"]:
        return True
    return bool(_PYTHON.fullmatch(names[0])) and len(names) > 1 and names[1] in _BARRIERS


def _is_given(words: Sequence[str], first: str, second: str) -> bool:
    pattern = re.compile(rf"--{first}[-_]{second}(=.*)?", re.DOTALL)
    return any(pattern.fullmatch(word) for word in words)
