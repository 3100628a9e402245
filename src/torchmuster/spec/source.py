"""YAML into plain values, with the place in the file of every key and value.

Built from the parser's events rather than from `yaml.load`: no tag constructs anything, the depth
and the number of nodes are bounded, and a key that stands twice with two values is an error.
"""

import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from torchmuster.errors import UsageError
from torchmuster.spec.findings import KeyPath

MAX_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 100
MAX_NODES = 100_000  # aliases count as often as they are used

# (line, column), both from 1; the column is None where rendering has moved it.
Position = tuple[int, int | None]
Locate = Callable[[int, int], Position]

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PREFIX = "tag:yaml.org,2002:"
_TAGS = frozenset(
    _PREFIX + name
    for name in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq", "merge", "value")
)
_QUOTE = "put quotes around the value"
_QUOTE_KEY = "put quotes around the key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that the user wrote."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Values with their places.

    Attributes:
        value: Maps, lists and scalars; None for an empty text.
        keys: (line, column) of each key, from 1, in the text that was parsed.
        values: The same for each value; list items have an entry here only.
        name: The file's name in messages.
        locate: Turns a place in the text into one of the user's file.
        twice: A warning for each key that stands twice and says the same.
    """

    value: Any
    keys: dict[KeyPath, tuple[int, int]]
    values: dict[KeyPath, tuple[int, int]]
    name: str
    locate: Locate
    twice: tuple[UsageError, ...] = ()

    def position(self, path: KeyPath, *, at_key: bool = False) -> Position:
        """Return the place in the user's file of a path, or of the nearest one above that exists."""
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
    """Return `file:line:column`, or `file:line` when the column is not known."""
    line, column = position
    return f"{name}:{line}" if column is None else f"{name}:{line}:{column}"


def parse_yaml(text: str, name: str, locate: Locate | None = None) -> Document:
    """Return the values of one YAML document and where they stand.

    Args:
        text: YAML, at most 4 MiB.
        name: The file's name for messages.
        locate: Turns (line, column) of `text` into the place in the user's file.

    Raises:
        UsageError: It is too large, too deep, no YAML, or has a key twice with two values, a tag of its own, or
            more than one document.
    """
    reader = _Reader(text, name, locate or (lambda line, column: (line, column)))
    root = reader.read()
    keys: dict[KeyPath, tuple[int, int]] = {}
    values: dict[KeyPath, tuple[int, int]] = {}
    builder = _Builder(reader, keys, values)
    value = None if root is None else builder.build(root, (), 0)
    return Document(
        value=value,
        keys=keys,
        values=values,
        name=name,
        locate=reader.locate,
        twice=tuple(builder.twice),
    )


@dataclass(slots=True)
class _Node:
    """A scalar, a list of nodes, or a list of (key, value)."""

    kind: str
    line: int
    column: int
    scalar: Any = None
    items: list["_Node"] = field(default_factory=list)
    is_merge: bool = False


class _Reader:
    """Turns events into nodes; an alias is the node that it names."""

    def __init__(self, text: str, name: str, locate: Locate) -> None:
        self._text, self._name, self.locate = text, name, locate
        self._anchors: dict[str, _Node] = {}
        self._loader: Any = None
        self._count = 0

    def read(self) -> _Node | None:
        """Return the root, None for an empty text."""
        if len(self._text) > MAX_BYTES or len(_encode(self._text)) > MAX_BYTES:
            what = f"the YAML is larger than {MAX_BYTES // 1024**2} MiB"
            raise UsageError(
                what, where=self._name, fix="move large contents to files (`localpath`)"
            )
        try:
            self._loader = _Loader(self._text)
            return self._document()
        except yaml.YAMLError as error:
            raise self._explain(error) from error
        except UnicodeError as error:
            raise UsageError("the file is not UTF-8", where=self._name, why=str(error)) from error
        finally:
            if self._loader is not None:
                self._loader.dispose()

    def fail(self, place: tuple[int, int], what: str, **more: str | None) -> UsageError:
        """Return an error with the place in the user's file."""
        return UsageError(what, where=show_place(self._name, self.locate(*place)), **more)

    def scalar(self, tag: str, value: str, mark: Any) -> Any:
        """Return the value of a scalar that is not a string, as PyYAML's safe loader reads it."""
        node = yaml.ScalarNode(tag, value, mark, mark)
        try:
            return self._loader.yaml_constructors[tag](self._loader, node)
        except (ValueError, KeyError, OverflowError, IndexError, AttributeError) as error:
            kind = tag.removeprefix(_PREFIX)
            what = f"`{value[:80]}` is no {kind}"
            raise self.fail(_place(mark), what, why=str(error)[:200], fix=_QUOTE) from error

    def _document(self) -> _Node | None:
        root = None
        for event in self._events():
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                what = "there is more than one YAML document"
                fix = "keep one workflow in a file; remove the `---`"
                raise self.fail(_place(event.start_mark), what, fix=fix)
            if isinstance(event, yaml.NodeEvent):
                root = self._node(event, 0)
        return root

    def _events(self) -> Iterator[Any]:
        while not isinstance(event := self._loader.get_event(), yaml.StreamEndEvent):
            yield event

    def _node(self, event: Any, depth: int) -> _Node:
        place = _place(event.start_mark)
        self._count += 1
        if self._count > MAX_NODES:
            raise self.too_many(place)
        if depth > MAX_DEPTH:
            raise self.too_deep(place)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, place)
        if isinstance(event, yaml.ScalarEvent):
            node = self._scalar_node(event, place)
            self._note(event, node)
            return node
        is_map = isinstance(event, yaml.MappingStartEvent)
        self._check_tag(event.tag, place)
        node = _Node("map" if is_map else "list", *place)
        self._note(event, node)
        end = yaml.MappingEndEvent if is_map else yaml.SequenceEndEvent
        while not isinstance(inner := self._loader.get_event(), end):
            node.items.append(self._node(inner, depth + 1))
        return node

    def _scalar_node(self, event: Any, place: tuple[int, int]) -> _Node:
        tag = event.tag
        if tag is None and not event.implicit[0]:
            return _Node("scalar", *place, event.value)
        if tag is None or tag == "!":
            tag = self._loader.resolve(yaml.ScalarNode, event.value, event.implicit)
            if tag in (_PREFIX + "int", _PREFIX + "float") and ":" in event.value:
                tag = _PREFIX + "str"  # YAML 1.1 reads `2:4` as 124, sixty to the unit
        if tag == _PREFIX + "str":
            return _Node("scalar", *place, event.value)
        self._check_tag(tag, place)
        if tag in (_PREFIX + "merge", _PREFIX + "value"):
            return _Node("scalar", *place, event.value, is_merge=tag.endswith("merge"))
        return _Node("scalar", *place, self.scalar(tag, event.value, event.start_mark))

    def _note(self, event: Any, node: _Node) -> None:
        if event.anchor is not None:
            self._anchors[event.anchor] = node

    def _alias(self, event: Any, place: tuple[int, int]) -> _Node:
        node = self._anchors.get(event.anchor)
        if node is None:
            what = f"`*{event.anchor}` names an anchor that does not exist"
            why = f"a value that begins with `*` is an alias of `&{event.anchor}`"
            raise self.fail(place, what, why=why, fix=f"{_QUOTE}: '*{event.anchor}'")
        return node

    def _check_tag(self, tag: str | None, place: tuple[int, int]) -> None:
        if tag is not None and tag not in _TAGS and tag != "!":
            shown = "!!" + tag.removeprefix(_PREFIX) if tag.startswith(_PREFIX) else tag
            what = f"the YAML tag `{shown[:80]}` is not accepted"
            raise self.fail(place, what, fix="write a plain value; quotes if it begins with `!`")

    def too_many(self, place: tuple[int, int]) -> UsageError:
        """Return the error for too many nodes."""
        what = f"the YAML has more than {MAX_NODES} values when its aliases are written out"
        return self.fail(place, what, fix="use fewer tasks or aliases")

    def too_deep(self, place: tuple[int, int]) -> UsageError:
        """Return the error for too much nesting."""
        return self.fail(place, f"the YAML is nested more than {MAX_DEPTH} deep")

    def _explain(self, error: yaml.YAMLError) -> UsageError:
        place, problem, context = (1, 1), str(error), None
        if isinstance(error, yaml.MarkedYAMLError):
            mark = error.problem_mark or error.context_mark
            if "end of stream" in (error.problem or ""):  # where the quotation began says more
                mark = error.context_mark or mark
            place = _place(mark) if mark is not None else place
            problem, context = error.problem or problem, error.context
        elif isinstance(error, yaml.reader.ReaderError):
            problem = f"character {_show_character(error.character)}: {error.reason}"
            place = _find_character(self._text, error.character) or place
        lines = re.split(r"\r\n|\r|\n", self._text)
        line = lines[place[0] - 1] if place[0] <= len(lines) else ""
        above = next((text for text in reversed(lines[: place[0] - 1]) if text.strip()), "")
        what, fix = _plain_words(problem, line, above, place[1])
        why = f"{context}, {problem}" if context else problem
        return self.fail(place, what, why=why, fix=fix)


class _Builder:
    """Turns nodes into plain values and notes where they stand."""

    def __init__(
        self,
        reader: _Reader,
        keys: dict[KeyPath, tuple[int, int]],
        values: dict[KeyPath, tuple[int, int]],
    ) -> None:
        self._reader, self._keys, self._values = reader, keys, values
        self._count = 0
        self.twice: list[UsageError] = []

    def build(self, node: _Node, path: KeyPath, depth: int) -> Any:
        """Return the value of a node; aliases are written out."""
        place = (node.line, node.column)
        self._count += 1
        if self._count > MAX_NODES:
            raise self._reader.too_many(place)
        if depth > MAX_DEPTH:  # also ends a list that contains itself
            raise self._reader.too_deep(place)
        self._values[path] = place
        if node.kind == "scalar":
            return node.scalar
        if node.kind == "list":
            return [
                self.build(item, (*path, index), depth + 1) for index, item in enumerate(node.items)
            ]
        return self._map(node, path, depth)

    def _map(self, node: _Node, path: KeyPath, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        merges: list[_Node] = []
        for key, value in zip(node.items[::2], node.items[1::2], strict=True):
            if key.is_merge:
                merges.append(value)
                continue
            name = self._key(key)
            here = (*path, name)
            if name in found:
                self._take_again(key, value, here, found[name], depth)
                continue
            self._keys[here] = (key.line, key.column)
            found[name] = self.build(value, here, depth + 1)
        for merged in merges:
            self._merge(merged, found, path, depth + 1)
        return found

    def _take_again(self, key: _Node, value: _Node, here: KeyPath, first: Any, depth: int) -> None:
        """Note a key that stands twice and says the same; files of OSMO have such.

        Raises:
            UsageError: It says something else the second time.
        """
        line = self._reader.locate(self._keys[here][0], 1)[0]
        what, place = f"the key `{here[-1]}` stands twice", (key.line, key.column)
        again = _Builder(self._reader, {}, {})
        again._count = self._count
        # As written: True and 1 are equal, and not the same.
        is_same = repr(again.build(value, here, depth + 1)) == repr(first)
        self._count = again._count
        if not is_same:
            raise self._reader.fail(place, what, why=f"the other one is in line {line}")
        why = f"the other one is in line {line} and says the same: one of them is enough"
        self.twice.append(self._reader.fail(place, what, why=why))

    def _merge(self, node: _Node, found: dict[Any, Any], path: KeyPath, depth: int) -> None:
        """Add the keys of `<<: *other` that are not there; of several maps the first wins."""
        self._count += 1
        if depth > MAX_DEPTH or self._count > MAX_NODES:
            raise self._reader.too_deep((node.line, node.column))
        if node.kind == "list":
            for item in node.items:
                self._merge(item, found, path, depth + 1)
            return
        if node.kind != "map":
            what = "`<<` merges maps, and this is none"
            raise self._reader.fail((node.line, node.column), what)
        for key, value in zip(node.items[::2], node.items[1::2], strict=True):
            if key.is_merge:
                self._merge(value, found, path, depth + 1)
            elif (name := self._key(key)) not in found:
                self._keys[(*path, name)] = (key.line, key.column)
                found[name] = self.build(value, (*path, name), depth + 1)

    def _key(self, node: _Node) -> Any:
        if node.kind != "scalar" or not isinstance(node.scalar, Hashable):
            what = f"a {node.kind} can't be a key"
            why = "`{{` begins a map inside a map" if node.kind == "map" else None
            raise self._reader.fail((node.line, node.column), what, why=why, fix=_QUOTE)
        if node.scalar is None or isinstance(node.scalar, bool):
            word = {None: "nothing", True: "true", False: "false"}[node.scalar]
            what = f"a key is read as {word} here"
            why = "YAML takes `yes`, `no`, `on`, `off` and `null` for values, not for text"
            raise self._reader.fail((node.line, node.column), what, why=why, fix=_QUOTE_KEY)
        return node.scalar


def _place(mark: Any) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _show_character(character: Any) -> str:
    return f"U+{character:04X}" if isinstance(character, int) else repr(character)


def _find_character(text: str, character: Any) -> tuple[int, int] | None:
    code = character if isinstance(character, int) else ord(str(character)[:1] or "\0")
    index = text.find(chr(code)) if 0 <= code <= 0x10FFFF else -1
    if index < 0:
        return None
    return text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index)


def _plain_words(problem: str, line: str, above: str, column: int) -> tuple[str, str | None]:
    """Return what is wrong in plain words, and the commonest remedy."""
    rest = line[column - 1 :].lstrip()
    if "\t" in line[: len(line) - len(line.lstrip())] or rest.startswith("\t") or "\\t" in problem:
        return "a tab stands where YAML wants spaces", "indent with spaces"
    if "end of stream" in problem:
        return "a quotation mark has no second", None
    if re.search(r"[:\-\[,]\s*\{\{", line) or re.search(r"[:\-\[,]\s*\{\{", above):
        return "`{{` without quotes begins a YAML map", 'write "{{...}}" in quotes'
    start = re.search(r"(?:^|[:\-\[,]\s+)([@%&*`!])", line)
    if start:
        return f"a value can't begin with `{start[1]}` unless it is in quotes", _QUOTE
    if re.match(r"\s*(-\s+)?[\w-]+:[^\s/:]", above) and "mapping values" not in problem:
        return "a space is missing behind `:`", f"in `{above.strip()[:60]}`: write `key: value`"
    for text in (line, above):
        if re.match(r"\s*(-\s+)?[\w-]+:[^\s/:]", text):
            return "a space is missing behind `:`", f"in `{text.strip()[:60]}`: write `key: value`"
    if "mapping values are not allowed" in problem:
        fix = f"{_QUOTE} when it holds `: `; otherwise look at the indentation"
        return "a `key:` stands where none can be", fix
    if "expected ':'" in problem:
        return "a line has no `key:`", "write `key: value`, or indent the text below its `|`"
    if "expected" in problem:
        return "the indentation or a bracket does not fit", "compare with the lines above"
    return "this is not YAML", None
