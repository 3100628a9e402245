"""A shell script as bash reads it: words, commands and assignments, in order, with their loop or condition.

It runs nothing and never fails: text that bash would refuse is parsed as well as possible, and mistakes that change the meaning of
a line are recorded with their line number.

Source: https://www.gnu.org/software/bash/manual/bash.html, "Shell Operation" and "Quoting".
"""

import re
from dataclasses import dataclass, field

DEFERRED = "\ue002"  # a `$` that this shell leaves alone: quoted, for the next shell
FIXED = "\ue003"  # a `$` that an outer shell has expanded already
_OPERATOR = re.compile(r";;&?|;&|;|&&|&>>?|&|\|\||\|&|\||<<<|<<-?|<>|>>|>\||[<>]&|[<>]|[()]")
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w-]*>")
_BLANKS_AT_END = re.compile(r"\\[ \t]+(?:\r?\n)")
_PLAIN = re.compile(rf"[^\s\\'\"`${FIXED};&|<>()]+")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_SUBSTITUTION = re.compile(rf"[${FIXED}][({{]")
_IN_QUOTES = re.compile(r"\\([$`\"\\])|`((?:\\.|[^`\\])*)`", re.DOTALL)
_IN_HERE_DOCUMENT = re.compile(r"\\([$`\\])")
_JOINS_BEFORE, _JOINS_AFTER = frozenset(",:=/|&;([{\"'"), frozenset(",:=/|&;)]}")


@dataclass(slots=True)
class ShellToken:
    """A word, an operator, the end of a line or a here-document, according to `kind`.

    Attributes:
        raw: As written.
        text: Without quotes; a `$` that this shell does not expand is `DEFERRED`.
        line: Where it begins, from 1.
    """

    kind: str
    raw: str = ""
    text: str = ""
    line: int = 0
    quoted: bool = False


@dataclass(slots=True)
class Slips:
    """Lines with a mistake that bash accepts without a message, from 1.

    Attributes:
        glued: No blank before the backslash, and none at the start of the next line.
        blanks_after: Blanks after the backslash, so that the command ends there.
        comments_inside: A comment inside a continued command, which ends it.
    """

    glued: list[int] = field(default_factory=list)
    blanks_after: list[int] = field(default_factory=list)
    comments_inside: list[int] = field(default_factory=list)


def lex(text: str, first_line: int = 1) -> tuple[list[ShellToken], Slips]:
    """Return the tokens of a script, and its mistakes."""
    lexer = _Lexer(text, first_line)
    lexer.run()
    return lexer.tokens, lexer.slips


def shown(text: str) -> str:
    """Return a text with its `$` as written."""
    return text.replace(DEFERRED, "$").replace(FIXED, "$")


def split_value(text: str) -> list[str]:
    """Return the words of an unquoted variable's value; a substitution stays one word."""
    words, begin, position = list[str](), 0, 0
    while position < len(text):
        if _SUBSTITUTION.match(text, position) is not None:
            position = find_end(text, position + 2, ")" if text[position + 1] == "(" else "}")
            continue
        if text[position].isspace():
            words.append(text[begin:position])
            begin = position + 1
        position += 1
    return [word for word in (*words, text[begin:]) if word]


def is_substitution(word: str) -> bool:
    """Return whether a word is one command substitution, and nothing else."""
    return word[:2] in ("$(", f"{FIXED}(") and find_end(word, 2, ")") == len(word)


def find_end(text: str, position: int, closer: str) -> int:
    """Return the position after the bracket that closes the one before `position`."""
    stack = [closer]
    while position < len(text) and stack:
        char, top = text[position], stack[-1]
        step = 1
        if char == "\\":
            step = 2
        elif char == top:
            stack.pop()
        elif text.startswith(("$(", "${", f"{FIXED}(", f"{FIXED}{{"), position):
            stack.append(")" if text[position + 1] == "(" else "}")
            step = 2
        elif top != '"':
            step = _step_in_code(text, position, stack)
        position += step
    return min(position, len(text))


def _step_in_code(text: str, position: int, stack: list[str]) -> int:
    char, top = text[position], stack[-1]
    if char == '"' or (char == "(" and top == ")"):
        stack.append('"' if char == '"' else ")")
    elif char in "'#":
        if char == "#" and (top != ")" or text[position - 1] not in " \t\n"):
            return 1
        end = text.find("'" if char == "'" else "\n", position + 1)
        return len(text) if end < 0 else end + 1 - position
    return 1


class _Lexer:
    def __init__(self, text: str, first_line: int) -> None:
        self.text, self.line, self.position = text, first_line, 0
        self.tokens: list[ShellToken] = []
        self.slips = Slips()
        self._word: ShellToken | None = None
        self._here: list[tuple[str, bool, bool]] = []  # delimiter, strips tabs, is quoted
        self._strips_tabs: bool | None = None  # of the here-document whose delimiter comes next

    def run(self) -> None:
        while self.position < len(self.text):
            self._step(self.text[self.position])
        self._end_word()

    def _step(self, char: str) -> None:
        if char == "\n":
            self._end_of_line()
        elif char in " \t\r\f\v":
            self._end_word()
            self.position += 1
        elif char == "#" and self._word is None:
            end = self.text.find("\n", self.position)
            self.position = len(self.text) if end < 0 else end
        elif char == "\\":
            self._backslash()
        elif char in f"'\"`${FIXED}":
            self._quote_or_expansion(char)
        elif char in ";&|<>()":
            self._operator(char)
        else:
            plain = _PLAIN.match(self.text, self.position)
            taken = plain[0] if plain else char
            self._add(taken, taken)

    def _add(self, raw: str, text: str, *, quoted: bool = False) -> None:
        """Append `raw` to the word, as `text`."""
        if self._word is None:
            self._word = ShellToken("word", line=self.line)
        self._word.raw += raw
        self._word.text += text
        self._word.quoted |= quoted
        self.line += raw.count("\n")
        self.position += len(raw)

    def _end_word(self) -> None:
        word, self._word = self._word, None
        if word is None:
            return
        if self._strips_tabs is not None:
            self._here.append((shown(word.text), self._strips_tabs, word.quoted))
            self._strips_tabs = None
            return
        self.tokens.append(word)

    def _end_of_line(self) -> None:
        self._end_word()
        self._strips_tabs = None
        self.tokens.append(ShellToken("\n", line=self.line))
        self.position += 1
        self.line += 1
        here, self._here = self._here, []
        for delimiter, strips, quoted in here:
            self._here_document(delimiter, strips=strips, quoted=quoted)

    def _here_document(self, delimiter: str, *, strips: bool, quoted: bool) -> None:
        first_line, lines = self.line, list[str]()
        while self.position < len(self.text):
            end = self.text.find("\n", self.position)
            end = len(self.text) if end < 0 else end
            line = self.text[self.position : end].rstrip("\r")
            line = line.lstrip("\t") if strips else line
            self.position = min(end + 1, len(self.text))
            self.line += 1
            if line == delimiter:
                break
            lines.append(line)
        body = "\n".join(lines)
        text = body.replace("$", DEFERRED) if quoted else _IN_HERE_DOCUMENT.sub(_expanded, body)
        self.tokens.append(ShellToken("here", body, text, first_line, quoted))

    def _backslash(self) -> None:
        rest = self.text[self.position + 1 : self.position + 3]
        if rest[:1] == "\n" or rest == "\r\n":
            self._continue(2 if rest[:1] == "\n" else 3)
        elif (match := _BLANKS_AT_END.match(self.text, self.position)) is not None:
            self.slips.blanks_after.append(self.line)
            self._end_word()
            self._continue(len(match[0]))
        else:
            char = rest[:1]
            self._add(f"\\{char}", DEFERRED if char == "$" else char, quoted=True)

    def _continue(self, length: int) -> None:
        """Continue in the next line; split a word that was glued to the next one by mistake."""
        line, before = self.line, self.text[self.position - 1 : self.position]
        self.position += length
        self.line += 1
        after = self.text[self.position : self.position + 1]
        if self._word is not None and self._is_glued(before, after):
            self.slips.glued.append(line)
            self._end_word()
        if self._word is None:
            self._look_for_comment()

    def _is_glued(self, before: str, after: str) -> bool:
        if not after or after.isspace() or before in _JOINS_BEFORE or after in _JOINS_AFTER:
            return False
        word = self._word.raw if self._word is not None else ""
        return after == "-" or word.startswith("-")

    def _look_for_comment(self) -> None:
        """Record and skip a comment between two lines of a command, which bash would end there."""
        lines = self.text[self.position : self.position + 2000].split("\n", 2)
        if len(lines) < 2 or not lines[0].lstrip().startswith("#"):
            return
        if lines[1].lstrip().startswith("-"):
            self.slips.comments_inside.append(self.line)
            self.position += len(lines[0]) + 1
            self.line += 1

    def _quote_or_expansion(self, char: str) -> None:
        text, at = self.text, self.position
        if char == "'":
            end = text.find("'", at + 1)
            end = len(text) if end < 0 else end + 1
            body = text[at + 1 : end - 1 if end > at + 1 else end]
            self._add(text[at:end], body.replace("$", DEFERRED), quoted=True)
        elif char == '"':
            end = find_end(text, at + 1, '"')
            self._add(text[at:end], _unquote(text[at + 1 : max(at + 1, end - 1)]), quoted=True)
        elif char == "`":
            end = find_end(text, at + 1, "`")
            self._add(text[at:end], f"$({text[at + 1 : max(at + 1, end - 1)]})")
        elif char == "$" and text[at + 1 : at + 2] == "'":  # $'...'
            self.position += 1
            self._quote_or_expansion("'")
        elif text[at + 1 : at + 2] in ("(", "{"):
            end = find_end(text, at + 2, ")" if text[at + 1] == "(" else "}")
            self._add(text[at:end], text[at:end])
        else:
            self._add(char, char)

    def _operator(self, char: str) -> None:
        if (match := _PLACEHOLDER.match(self.text, self.position)) is not None:
            self._add(match[0], match[0])  # `<your-name>` in a script that is still a draft
            return
        if char == "(" and self._word is not None and _ARRAY.fullmatch(self._word.raw):
            end = find_end(self.text, self.position + 1, ")")
            body = self.text[self.position : end]
            self._add(body, body)
            return
        if char in "<>" and self._word is not None and self._word.raw.isdigit():
            self._word = None  # the 2 of `2>`
        self._end_word()
        match = _OPERATOR.match(self.text, self.position)
        found = match[0] if match else char
        if found in ("<<", "<<-"):
            self._strips_tabs = found == "<<-"
        else:
            self.tokens.append(ShellToken("operator", found, found, self.line))
        self.position += len(found)


def _unquote(body: str) -> str:
    """Return the text between double quotes."""
    return _IN_QUOTES.sub(_expanded, body.replace("\\\n", ""))


def _expanded(match: re.Match[str]) -> str:
    if match[1] is None:
        return f"$({match[2]})"  # backquotes
    return DEFERRED if match[1] == "$" else match[1]


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=")
_OPENERS = {"if": "if", "while": "loop", "until": "loop", "for": "loop", "select": "loop"}
_CLOSERS = frozenset({"fi", "done", "esac", "}"})
_SKIPPED_KEYWORDS = frozenset({"then", "else", "elif", "do", "!", "time", "{"})
_DECLARERS = frozenset({"export", "declare", "typeset", "readonly", "local"})
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
        by_name: The assignments, without those for one command (`X=1 command`).
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
        inner = read_shell(for_inner_shell(text), first_line)
        inner.by_name = {**self.by_name, **inner.by_name}
        return inner

    def assignment_of(self, name: str, line: int | None = None) -> Assignment | None:
        """Return the last assignment to a name at or above `line`; if there is none, the last of all."""
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
            found = None if name in seen else self.assignment_of(name, line)
            if found is None:
                return match[3] if match[3] is not None and name not in seen else match[0]
            used.add(name)
            return for_inner_shell(found.value) if match[0][0] == FIXED else found.value

        for _ in range(5):
            used: set[str] = set()
            after = _VARIABLE.sub(fill, text, count=_MAX_EXPANSIONS)[:_MAX_LENGTH]
            seen |= used
            if after == text:
                break
            text = after
        return text

    def sources(self, text: str, line: int | None = None) -> list[Assignment]:
        """Return the assignments that a text depends on, the direct ones first."""
        found: list[Assignment] = []
        names = variables_of(text)
        while names and len(found) < _MAX_EXPANSIONS:
            name = names.pop(0)
            source = self.assignment_of(name, line)
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
        self._next_is_redirected_to = False

    def take(self, token: ShellToken) -> None:
        if token.kind == "word":
            if not self._next_is_redirected_to:
                self._words.append(token)
            self._next_is_redirected_to = False
            return
        if token.kind == "here":
            self.script.here.append(token)
            return
        self._next_is_redirected_to = (
            token.kind == "operator"
            and token.raw[0] in "<>&"
            and token.raw
            not in (
                "&",
                "&&",
            )
        )
        if self._next_is_redirected_to:
            return
        if token.raw == "(" and len(self._words) == 1 and self._names_function():
            self._words.insert(0, ShellToken("word", "function", "function"))
            return
        self.end(background=token.raw == "&")

    def _names_function(self) -> bool:
        word = self._words[0].raw
        return bool(re.fullmatch(r"[\w.:-]+", word)) and word not in {
            *_OPENERS,
            *_SKIPPED_KEYWORDS,
            "case",
        }

    def end(self, *, background: bool = False) -> None:
        words, self._words = self._words, []
        words = self._after_keywords(words)
        given: list[ShellToken] = []
        while words and _ASSIGNMENT.match(words[0].raw):
            given.append(words.pop(0))
        if words and words[0].raw in _DECLARERS:
            self._declare(words)
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
            elif word not in _SKIPPED_KEYWORDS:
                return words
            words = words[1:]
        return words

    def _declare(self, words: list[ShellToken]) -> None:
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


def for_inner_shell(text: str) -> str:
    """Return a script for another shell: this shell's `$` become `FIXED`, deferred ones active."""
    return text.replace("$", FIXED).replace(DEFERRED, "$")
