"""Read YAML, and the values for a workflow file: `--set`, `--set-string` and `default-values:`.

YAML becomes plain values, with the position in the file of every key and value. PyYAML's nodes have
positions. Its constructor is not used for maps and lists: no tag constructs anything, the depth and
the number of nodes are limited, and a key that occurs twice with two values is an error.

Numbers of `--set` are parsed as in the format (`07` is 7, `1e3` is 1000.0); `true`, `false`, lists
and maps are recognised. Nothing is evaluated.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.composer import Composer

from torchmuster.core.spec.problems import KeyPath, Problems
from torchmuster.errors import UsageError
from torchmuster.workflow.tokens import BARE_KINDS

MAX_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 100
MAX_NODES = 100_000  # an alias counts at every use

# (line, column), both from 1; the column is None if rendering has moved it.
Position = tuple[int, int | None]
Locate = Callable[[int, int], Position]

_Mark = tuple[int, int]
# The C parser below Python's composer, which can be limited; the C composer crashes on deep
# nesting.
_BASES: Any = (Composer, yaml.CSafeLoader) if hasattr(yaml, "CSafeLoader") else (yaml.SafeLoader,)
_PREFIX = "tag:yaml.org,2002:"
_AS_WRITTEN = frozenset(_PREFIX + name for name in ("str", "merge", "value"))
_SCALARS = frozenset(_PREFIX + name for name in ("int", "float", "bool", "null", "timestamp"))
_TAGS = _AS_WRITTEN | _SCALARS | {_PREFIX + "map", _PREFIX + "seq"}
_MERGE = _PREFIX + "merge"
_QUOTE = "put quotes around the value"
_QUOTE_KEY = "put quotes around the key"
_READ_AS = {None: "nothing", True: "true", False: "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that the user wrote."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Values of a YAML document, with their positions.

    Attributes:
        value: Maps, lists and scalars; None for an empty text.
        keys: (line, column) of each key, from 1, in the parsed text.
        values: The same for each value; list items have an entry only here.
        name: The file's name in messages.
        locate: Converts a position in the text to one in the user's file.
        twice: A warning for each key that occurs twice with the same value.
    """

    value: Any
    keys: dict[KeyPath, _Mark]
    values: dict[KeyPath, _Mark]
    name: str
    locate: Locate
    twice: tuple[UsageError, ...] = ()

    def position(self, path: KeyPath, *, at_key: bool = False) -> Position:
        """Return the position in the user's file of a path, or of its nearest existing parent."""
        while path:
            places = (self.keys, self.values) if at_key else (self.values, self.keys)
            for place in (places[0].get(path), places[1].get(path)):
                if place is not None:
                    return self.locate(*place)
            path, at_key = path[:-1], True
        return self.locate(*self.values.get((), (1, 1)))

    def where(self, path: KeyPath, *, at_key: bool = False) -> str:
        """Return `file:line:column` of a path."""
        return show_place(self.name, self.position(path, at_key=at_key))


def show_place(name: str, position: Position) -> str:
    """Return `file:line:column`, or `file:line` if the column is not known."""
    line, column = position
    return f"{name}:{line}" if column is None else f"{name}:{line}:{column}"


def parse_yaml(text: str, name: str, locate: Locate | None = None) -> Document:
    """Parse one YAML document into values and their positions.

    Args:
        text: YAML, at most 4 MiB.
        name: The file's name for messages.
        locate: Converts (line, column) of `text` to the place in the user's file.

    Raises:
        UsageError: The text is too large, too deep or not YAML, or has a key with two values, a
            custom tag or more than one document.
    """
    locate = locate or (lambda line, column: (line, column))
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "replace")) > MAX_BYTES:
        what = f"the YAML is larger than {MAX_BYTES // 1024**2} MiB"
        raise UsageError(what, where=name, fix="move large contents to files (`localpath`)")
    try:
        builder = _Builder(name, locate, _Loader(text))
        value = builder.read()
    except yaml.YAMLError as error:
        raise _explain(error, text, name, locate) from error
    except UnicodeError as error:
        raise UsageError("the file is not UTF-8", where=name, why=str(error)) from error
    return Document(
        value=value,
        keys=builder.keys,
        values=builder.values,
        name=name,
        locate=locate,
        twice=tuple(builder.twice),
    )


class _BoundError(yaml.MarkedYAMLError):
    """A limit was exceeded, or an alias has no anchor; carries our message and its position."""

    def __init__(self, place: Any, what: str, why: str | None = None, fix: str | None = None):
        super().__init__(problem=what, problem_mark=place)
        self.why, self.fix = why, fix


class _Loader(*_BASES):  # type: ignore[misc]
    """Composes nodes, and limits their number and depth."""

    def __init__(self, text: str) -> None:
        _BASES[-1].__init__(self, text)
        Composer.__init__(self)
        self._depth = self._count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node; for an alias, the node that it refers to."""
        event = self.peek_event()
        self._count += 1
        _check_size(event.start_mark, self._depth, self._count)
        if not isinstance(event, yaml.AliasEvent):
            self.anchors.pop(event.anchor, None)  # PyYAML refuses to redefine an anchor
        elif event.anchor not in self.anchors:
            what = f"`*{event.anchor}` names an anchor that does not exist"
            why = f"a value that begins with `*` is an alias of `&{event.anchor}`"
            raise _BoundError(event.start_mark, what, why, f"{_QUOTE}: '*{event.anchor}'")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Return the tag of an untagged node; keep `2:4` as text, which in YAML 1.1 is 124."""
        tag = super().resolve(kind, value, implicit)
        is_number = tag in (_PREFIX + "int", _PREFIX + "float")
        return _PREFIX + "str" if is_number and ":" in value else tag


def _check_size(place: Any, depth: int, count: int) -> None:
    if count > MAX_NODES:
        what = f"the YAML has more than {MAX_NODES} values when its aliases are written out"
        raise _BoundError(place, what, fix="use fewer tasks or aliases")
    if depth > MAX_DEPTH:  # also ends a list that contains itself
        raise _BoundError(place, f"the YAML is nested more than {MAX_DEPTH} deep")


class _Builder:
    """Converts nodes to plain values and records their positions; expands aliases."""

    def __init__(self, name: str, locate: Locate, loader: Any) -> None:
        self._name, self._locate, self._loader = name, locate, loader
        self._count = 0
        self.keys: dict[KeyPath, _Mark] = {}
        self.values: dict[KeyPath, _Mark] = {}
        self.twice: list[UsageError] = []

    def read(self) -> Any:
        """Return the value of the single document; None for an empty text."""
        root = self._loader.get_single_node()
        return None if root is None else self._build(root, (), 0)

    def _fail(self, node: Any, what: str, why: str | None = None, fix: str | None = None) -> Any:
        where = show_place(self._name, self._locate(*_place(node.start_mark)))
        return UsageError(what, where=where, why=why, fix=fix)

    def _build(self, node: Any, path: KeyPath, depth: int) -> Any:
        self._count += 1
        _check_size(node.start_mark, depth, self._count)
        self._check_tag(node)
        self.values[path] = _place(node.start_mark)
        if isinstance(node, yaml.MappingNode):
            return self._map(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self._build(item, (*path, i), depth + 1) for i, item in enumerate(node.value)]
        return self._scalar(node)

    def _check_tag(self, node: Any) -> None:
        if node.tag not in _TAGS:
            shown = "!!" + node.tag.removeprefix(_PREFIX)
            shown = shown if node.tag.startswith(_PREFIX) else node.tag
            what = f"the YAML tag `{shown[:80]}` is not accepted"
            raise self._fail(node, what, fix="write a plain value; quotes if it begins with `!`")

    def _scalar(self, node: Any) -> Any:
        if node.tag in _AS_WRITTEN:
            return node.value
        try:
            return self._loader.yaml_constructors[node.tag](self._loader, node)
        except (ValueError, KeyError, OverflowError, IndexError, AttributeError) as error:
            what = f"`{node.value[:80]}` is not a valid {node.tag.removeprefix(_PREFIX)}"
            raise self._fail(node, what, str(error)[:200], _QUOTE) from error

    def _map(self, node: Any, path: KeyPath, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                continue
            here = (*path, self._key(key))
            if here[-1] in found:
                self._build_again(key, value, here, found[here[-1]], depth)
            else:
                self.keys[here] = _place(key.start_mark)
                found[here[-1]] = self._build(value, here, depth + 1)
        for merged in (value for key, value in node.value if key.tag == _MERGE):
            self._merge(merged, found, path, depth + 1)
        return found

    def _build_again(self, key: Any, value: Any, here: KeyPath, first: Any, depth: int) -> None:
        """Record a key that occurs twice with the same value, as in some OSMO files.

        Raises:
            UsageError: The second value differs.
        """
        why = f"the other one is in line {self._locate(self.keys[here][0], 1)[0]}"
        what = f"the key `{here[-1]}` occurs twice"
        kept, self.keys, self.values = (self.keys, self.values), {}, {}
        again = self._build(value, here, depth + 1)
        self.keys, self.values = kept
        if repr(again) != repr(first):  # compared as written: True == 1, but they differ here
            raise self._fail(key, what, why)
        why += " with the same value: remove one of them"
        self.twice.append(self._fail(key, what, why))

    def _merge(self, node: Any, found: dict[Any, Any], path: KeyPath, depth: int) -> None:
        """Add the missing keys of `<<: *other`; if several maps have a key, the first wins."""
        self._count += 1
        _check_size(node.start_mark, depth, self._count)
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self._merge(item, found, path, depth + 1)
            return
        if not isinstance(node, yaml.MappingNode):
            raise self._fail(node, "`<<` merges maps, and this is not a map")
        for key, value in node.value:
            if key.tag == _MERGE:
                self._merge(value, found, path, depth + 1)
            elif (name := self._key(key)) not in found:
                self.keys[(*path, name)] = _place(key.start_mark)
                found[name] = self._build(value, (*path, name), depth + 1)

    def _key(self, node: Any) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            is_map = isinstance(node, yaml.MappingNode)
            why = "`{{` begins a map inside a map" if is_map else None
            raise self._fail(node, f"a {'map' if is_map else 'list'} can't be a key", why, _QUOTE)
        self._check_tag(node)
        value = self._scalar(node)
        if value is None or isinstance(value, bool):
            why = "YAML reads `yes`, `no`, `on`, `off` and `null` as values, not as text"
            what = f"a key is read as {_READ_AS[value]} here"
            raise self._fail(node, what, why, _QUOTE_KEY)
        return value


def _explain(error: yaml.YAMLError, text: str, name: str, locate: Locate) -> UsageError:
    """Convert PyYAML's error to our message, with the position in the user's file."""
    place, problem = (1, 1), str(error)
    context: str | None = None
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        if "end of stream" in (error.problem or ""):  # the start of the quotation is more useful
            mark = error.context_mark or mark
        place = _place(mark) if mark is not None else place
        problem, context = error.problem or problem, error.context
    elif isinstance(error, yaml.reader.ReaderError):
        problem = f"character {_show_character(error.character)}: {error.reason}"
        place = _find_character(text, error.character) or place
    where = show_place(name, locate(*place))
    if isinstance(error, _BoundError):
        return UsageError(problem, where=where, why=error.why, fix=error.fix)
    if problem == "but found another document":
        fix = "keep one workflow in a file; remove the `---`"
        return UsageError("there is more than one YAML document", where=where, fix=fix)
    lines = re.split(r"\r\n|\r|\n", text)
    line = lines[place[0] - 1] if place[0] <= len(lines) else ""
    above = next((text for text in reversed(lines[: place[0] - 1]) if text.strip()), "")
    what, remedy = _plain_words(problem, line, above, place[1])
    why = f"{context}, {problem}" if context else problem
    return UsageError(what, where=where, why=why, fix=remedy)


def _place(mark: Any) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1


def _show_character(character: Any) -> str:
    return f"U+{character:04X}" if isinstance(character, int) else repr(character)


def _find_character(text: str, character: Any) -> tuple[int, int] | None:
    code = character if isinstance(character, int) else ord(str(character)[:1] or "\0")
    index = text.find(chr(code)) if 0 <= code <= 0x10FFFF else -1
    if index < 0:
        return None
    return text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index)


def _plain_words(problem: str, line: str, above: str, column: int) -> tuple[str, str | None]:
    """Return the problem in plain English, and the most common fix."""
    rest = line[column - 1 :].lstrip()
    if "\t" in line[: len(line) - len(line.lstrip())] or rest.startswith("\t") or "\\t" in problem:
        return "a tab is used where YAML requires spaces", "indent with spaces"
    if "end of stream" in problem:
        return "a quotation mark is not closed", None
    if re.search(r"[:\-\[,]\s*\{\{", line) or re.search(r"[:\-\[,]\s*\{\{", above):
        return "`{{` without quotes begins a YAML map", 'write "{{...}}" in quotes'
    start = re.search(r"(?:^|[:\-\[,]\s+)([@%&*`!])", line)
    if start:
        return f"a value can't begin with `{start[1]}` unless it is in quotes", _QUOTE
    for text in (line, above) if "mapping values" in problem else (above, line):
        if re.match(r"\s*(-\s+)?[\w-]+:[^\s/:]", text):
            return "a space is missing after `:`", f"in `{text.strip()[:60]}`: write `key: value`"
    if "mapping values are not allowed" in problem:
        fix = f"{_QUOTE} when it holds `: `; otherwise look at the indentation"
        return "a `key:` is not allowed here", fix
    if "expected ':'" in problem:
        return "a line has no `key:`", "write `key: value`, or indent the text below its `|`"
    if "expected" in problem:
        what = "the indentation is wrong, or a bracket does not match"
        return what, "compare with the lines above"
    return "this is not YAML", None


TOKEN_NAMES = frozenset({*BARE_KINDS, "input", "host"})
RESERVED = frozenset(
    {
        *("and", "or", "not", "in", "is", "if", "else", "for", "loop", "self"),
        *("true", "false", "none", "True", "False", "None"),
    }
)
_BOOLS = {"true": True, "false": False, "True": True, "False": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """A name in `default-values:`.

    Attributes:
        help: The comment after the value, or on the lines above it; empty without one.
        line: Its line in the file, from 1.
    """

    name: str
    value: Any
    help: str
    line: int


def parse_sets(words: Sequence[str], problems: Problems) -> dict[str, Any]:
    """Parse the values of `--set NAME=VALUE ...`; the last one counts if a name is given twice."""
    found: dict[str, Any] = {}
    for name, text in _pairs(words, "--set", problems):
        try:
            found[name] = _value(text)
        except (ValueError, RecursionError) as error:
            what = f"`{text[:80]}` begins like a JSON list or map but is not valid JSON"
            fix = f"--set-string {name}=... keeps it as text"
            problems.add(what, f"--set {name}=...", _short(error), fix)
    return found


def parse_set_strings(words: Sequence[str], problems: Problems) -> dict[str, Any]:
    """Parse the values of `--set-string NAME=VALUE ...`, which are always text."""
    return dict(_pairs(words, "--set-string", problems))


def default_values(text: str, name: str, first_line: int, problems: Problems) -> list[Default]:
    """Parse a section `default-values:`.

    Args:
        text: The section, including the line of its key.
        name: The file's name for messages.
        first_line: The line of the file where the section begins, from 1.
        problems: Receives the problems.
    """
    try:
        document = parse_yaml(text, name, lambda line, column: (line + first_line - 1, column))
    except UsageError as error:
        why = error.why
        if "{{" in text or "{%" in text:
            why = f"{why}; default-values are read before Jinja, so they can't hold unquoted Jinja"
        problems.add(error.what, error.where, why, error.fix)
        return []
    for again in document.twice:
        problems.add(again.what, again.where, again.why)
    values = document.value.get("default-values") if isinstance(document.value, dict) else None
    if values is None:
        return []
    if not isinstance(values, dict):
        where = document.where(("default-values",))
        fix = "default-values:\n  n_nodes: 2"
        problems.add("`default-values` is not a map of names to values", where, fix=fix)
        return []
    lines = text.split("\n")
    found = []
    for key, value in values.items():
        path = ("default-values", key)
        line = document.keys[path][0]
        if not isinstance(key, str):
            problems.add(f"`{key}` is not a name", document.where(path, at_key=True))
            continue
        comment = _comment(lines, line - 1)
        found.append(Default(name=key, value=value, help=comment, line=line + first_line - 1))
    return found


def check_name(name: str) -> str | None:
    """Return why a name can't be used in a template; None if it can."""
    if name in RESERVED:
        return "the word is reserved in Jinja"
    if not (name.isidentifier() and name.isascii()):
        return "names consist of letters, digits and `_` and don't begin with a digit"
    return None


def _pairs(words: Sequence[str], option: str, problems: Problems) -> Iterator[tuple[str, str]]:
    for word in words:
        name, equals, text = word.partition("=")
        where = f"{option} {name}"
        if not equals:
            problems.add(f"`{name}` has no value", where, fix=f"{option} {name}=VALUE")
        elif name in TOKEN_NAMES:
            what = f"`{name}` is the name of a token and can't be set"
            problems.add(what, where, f"`{{{{{name}}}}}` gets its value when a task starts")
        elif why := check_name(name):
            problems.add(
                f"`{name}` is not a valid name of a value", where, why, _better_name(name, option)
            )
        else:
            yield name, text


def _better_name(name: str, option: str) -> str | None:
    first, dot, rest = name.partition(".")
    if dot and first.isidentifier() and rest.isidentifier():
        return f"set the whole map: --set '{first}={{\"{rest}\": ...}}'"
    mended = re.sub(r"\W", "_", name, flags=re.ASCII)
    if check_name(mended) is None:
        return f"{option} {mended}=..., with `{mended}` in the file"
    return None


def _value(text: str) -> Any:
    if text in _BOOLS:
        return _BOOLS[text]
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if number in (float("inf"), float("-inf")) and "inf" not in text.lower():
            return text  # such as thousands of digits
        return number
    if text[:1] in ("[", "{") and not text.startswith(("{{", "{%")):
        return json.loads(text)
    return text


def _short(error: BaseException) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _comment(lines: Sequence[str], index: int) -> str:
    """Return the comment after the value that begins in a line, else the one above it."""
    trailing = _trailing_comment(lines[index])
    if trailing:
        return trailing
    above: list[str] = []
    for line in reversed(lines[1:index]):
        if not line.lstrip().startswith("#"):
            break
        above.append(line.strip().lstrip("#").strip())
    return " ".join(reversed(above)).strip()


def _trailing_comment(line: str) -> str:
    quote = ""
    for index, character in enumerate(line):
        if quote:
            quote = "" if character == quote and line[index - 1] != "\\" else quote
        elif character in "'\"" and line[:index].rstrip()[-1:] in (":", "[", "{", ",", ""):
            quote = character
        elif character == "#" and line[index - 1 : index] in (" ", "\t"):
            return line[index + 1 :].strip()
    return ""
