"""The commands and assignments of a shell script, in order, with their loop or condition."""

import re
from dataclasses import dataclass, field

from torchmuster.diagnose.lint.shell_lex import DEFERRED, FIXED, ShellToken, Slips, lex

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=")
_OPENERS = {"if": "if", "while": "loop", "until": "loop", "for": "loop", "select": "loop"}
_CLOSERS = frozenset({"fi", "done", "esac", "}"})
_PASSED = frozenset({"then", "else", "elif", "do", "!", "time", "{"})
_EXPORTERS = frozenset({"export", "declare", "typeset", "readonly", "local"})
_MAX_EXPANSIONS, _MAX_LENGTH = 200, 20_000
_VARIABLE = re.compile(rf"[${FIXED}](?:(\w+)|\{{(\w+)(?:\[[@*]\])?(?::?-([^}}]*))?\}})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """`NAME=VALUE`.

    Attributes:
        value: Without quotes; of an array, its words.
        raw: As written.
        exported: The line itself exports it, or it precedes a command.
    """

    name: str
    value: str
    raw: str
    line: int
    exported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word of a command; `bare` when no part of it is quoted."""

    text: str
    raw: str
    line: int
    bare: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellCommand:
    """One simple command, without assignments before it.

    Attributes:
        background: It ends in `&`.
        conditional: It is in an `if`, a `case` or a function.
        looped: It is in a loop.
        environment: Assignments for this command only.
    """

    words: tuple[Word, ...]
    line: int
    background: bool = False
    conditional: bool = False
    looped: bool = False
    environment: tuple[Assignment, ...] = ()

    @property
    def texts(self) -> list[str]:
        """The words without quotes."""
        return [word.text for word in self.words]

    @property
    def name(self) -> str:
        """The command without its folder."""
        return self.words[0].text.rsplit("/", 1)[-1]


@dataclass(slots=True)
class ShellScript:
    """A parsed shell script, in the order of its lines.

    Attributes:
        exports: Names that any line exports.
        exports_all: The script has `set -a`.
        by_name: The assignments for more than one command.
        here: Its here-documents.
    """

    commands: list[ShellCommand] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    exports: set[str] = field(default_factory=set)
    exports_all: bool = False
    slips: Slips = field(default_factory=Slips)
    by_name: dict[str, list[Assignment]] = field(default_factory=dict)
    here: list[ShellToken] = field(default_factory=list)

    def read_inner(self, text: str, first_line: int) -> "ShellScript":
        """Parse a script that this one passes to another shell."""
        inner = read_shell(bind(text), first_line)
        inner.by_name = {**self.by_name, **inner.by_name}
        return inner

    def value_of(self, name: str, line: int | None = None) -> Assignment | None:
        """Return the last assignment to a name, above `line` if there is one."""
        found = self.by_name.get(name)
        if not found:
            return None
        above = [a for a in found if line is not None and a.line <= line]
        return (above or found)[-1]

    def expand(self, text: str, line: int | None = None) -> str:
        """Return a text with the script's own variables expanded, as far as they are known."""
        seen: set[str] = set()

        def fill(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            found = None if name in seen else self.value_of(name, line)
            if found is None:
                return match[3] if match[3] is not None and name not in seen else match[0]
            used.add(name)
            return bind(found.value) if match[0][0] == FIXED else found.value

        for _ in range(5):
            used: set[str] = set()
            after = _VARIABLE.sub(fill, text, count=_MAX_EXPANSIONS)[:_MAX_LENGTH]
            seen |= used
            if after == text:
                break
            text = after
        return text

    def sources(self, text: str, line: int | None = None) -> list[Assignment]:
        """Return the assignments that a text depends on, the nearest first."""
        found: list[Assignment] = []
        names = variables_of(text)
        while names and len(found) < _MAX_EXPANSIONS:
            name = names.pop(0)
            source = self.value_of(name, line)
            if source is not None and source not in found:
                found.append(source)
                names += variables_of(source.value)
        return found


def variables_of(text: str) -> list[str]:
    """Return the names of the variables in a text, whether expanded here or later."""
    marks = re.escape(f"${DEFERRED}{FIXED}")
    return re.findall(rf"[{marks}]\{{?#?(\w+)", text)


def read_shell(text: str, first_line: int = 1) -> ShellScript:
    """Parse a script; never fail."""
    tokens, slips = lex(text, first_line)
    reader = _Reader(ShellScript(slips=slips))
    for token in tokens:
        reader.take(token)
    reader.end()
    return reader.script


class _Reader:
    def __init__(self, script: ShellScript) -> None:
        self.script = script
        self._words: list[ShellToken] = []
        self._stack: list[str] = []
        self._skips_word = False

    def take(self, token: ShellToken) -> None:
        if token.kind == "word":
            if not self._skips_word:
                self._words.append(token)
            self._skips_word = False
            return
        if token.kind == "here":
            self.script.here.append(token)
            return
        self._skips_word = (
            token.kind == "operator"
            and token.raw[0] in "<>&"
            and token.raw
            not in (
                "&",
                "&&",
            )
        )
        if self._skips_word:
            return
        if token.raw == "(" and len(self._words) == 1 and self._names_function():
            self._words.insert(0, ShellToken("word", "function", "function"))
            return
        self.end(background=token.raw == "&")

    def _names_function(self) -> bool:
        word = self._words[0].raw
        return bool(re.fullmatch(r"[\w.:-]+", word)) and word not in {*_OPENERS, *_PASSED, "case"}

    def end(self, *, background: bool = False) -> None:
        words, self._words = self._words, []
        words = self._after_keywords(words)
        given: list[ShellToken] = []
        while words and _ASSIGNMENT.match(words[0].raw):
            given.append(words.pop(0))
        if words and words[0].raw in _EXPORTERS:
            self._export(words)
        for token in given:
            self._assign(token, exported=False, before_command=bool(words))
        if words:
            self._command(words, given, background=background)

    def _after_keywords(self, words: list[ShellToken]) -> list[ShellToken]:
        while words:
            word = words[0].raw
            if word == "function":
                self._stack.append("function")
                return []
            if word in _OPENERS or word == "case":
                self._stack.append(_OPENERS.get(word, "case"))
                if word in ("for", "select", "case"):
                    return []
            elif word in _CLOSERS:
                if self._stack:
                    self._stack.pop()
                return []
            elif word == "{":
                if self._stack[-1:] == ["function"]:
                    self._stack[-1] = "in function"
                else:
                    self._stack.append("braces")
            elif word not in _PASSED:
                return words
            words = words[1:]
        return words

    def _export(self, words: list[ShellToken]) -> None:
        exported = words[0].raw == "export" or (len(words) > 1 and "x" in words[1].raw[:4])
        for token in words[1:]:
            if _ASSIGNMENT.match(token.raw):
                self._assign(token, exported=exported)
            elif exported:
                self.script.exports.add(token.text)

    def _assign(self, token: ShellToken, *, exported: bool, before_command: bool = False) -> None:
        name, _, value = token.text.partition("=")
        name = name.removesuffix("+")
        _, _, raw = token.raw.partition("=")
        if exported:
            self.script.exports.add(name)
        if raw.startswith("("):
            value = _words_of_array(raw)
        found = Assignment(
            name=name,
            value=value,
            raw=raw,
            line=token.line,
            exported=exported or before_command,
        )
        self.script.assignments.append(found)
        if not before_command:
            self.script.by_name.setdefault(name, []).append(found)

    def _command(
        self, words: list[ShellToken], given: list[ShellToken], *, background: bool
    ) -> None:
        if words[0].raw == "set" and any(_sets_allexport(word.raw) for word in words[1:]):
            self.script.exports_all = True
        self.script.commands.append(
            ShellCommand(
                words=tuple(
                    Word(text=w.text, raw=w.raw, line=w.line, bare=not w.quoted) for w in words
                ),
                line=words[0].line,
                background=background,
                conditional=any(k in ("if", "case", "in function") for k in self._stack),
                looped="loop" in self._stack,
                environment=tuple(self.script.assignments[-len(given) :]) if given else (),
            )
        )


def _sets_allexport(word: str) -> bool:
    return word == "allexport" or bool(re.fullmatch(r"-[a-zA-Z]*a[a-zA-Z]*", word))


def _words_of_array(raw: str) -> str:
    body = raw[1:-1] if raw.endswith(")") else raw[1:]
    tokens, _ = lex(body)
    return " ".join(token.text for token in tokens if token.kind == "word")


def bind(text: str) -> str:
    """Return a script for another shell: this shell's `$` become `FIXED`, deferred ones active."""
    return text.replace("$", FIXED).replace(DEFERRED, "$")
