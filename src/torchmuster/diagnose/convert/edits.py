"""Edits a workflow file by lines, for `muster convert`: other lines remain unchanged.

Loops of the template are expanded for their first iteration; keys of a task are found by their position in the YAML.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import yaml

from torchmuster.diagnose.convert.shell import CantConvertError, mask
from torchmuster.spec.problems import KeyPath, Problems
from torchmuster.spec.source import Document, Source, parse_yaml
from torchmuster.spec.values import default_values
from torchmuster.spec.workflow.sections import split_sections, to_lines

_STATEMENT = re.compile(r"\{%[-+]?\s*(\w+)\s*(.*?)\s*[-+]?%\}")
_OWN_LINE = re.compile(r"\s*(\{%.*?%\})\s*")
_LOOP = re.compile(r"(\w+)\s+in\s+range\(\s*(?:(\d+)\s*,)?[^,]*\)")
_SAFE = re.compile(r"(--?)?[A-Za-z_/][\w./+=-]*")
_WIDTH = 92


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLine:
    """One line and its number in the user's file, from 1."""

    number: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """`{% for NAME in range(...) %}` to `{% endfor %}`, both on lines of their own.

    Attributes:
        start: Index of its first line.
        end: Index of its last line.
        first: The value in the first iteration; None without a plain `range`.
    """

    start: int
    end: int
    name: str
    first: int | None


def find_loops(lines: Sequence[TextLine]) -> list[Loop]:
    """Return the loops of a template, the outer ones after the inner ones."""
    opened: list[tuple[int, str]] = []
    found: list[Loop] = []
    for index, line in enumerate(lines):
        match = _OWN_LINE.fullmatch(line.text)
        statement = _STATEMENT.fullmatch(match[1]) if match else None
        if statement is None:
            continue
        if statement[1] == "for":
            opened.append((index, statement[2]))
        elif statement[1] == "endfor" and opened:
            start, head = opened.pop()
            loop = _LOOP.fullmatch(head)
            first = int(loop[2] or 0) if loop else None
            name = loop[1] if loop else head.partition(" ")[0]
            found.append(Loop(start=start, end=index, name=name, first=first))
    return found


def first_round(lines: Sequence[TextLine], loop: Loop) -> list[TextLine]:
    """Return the lines of a loop's body in its first iteration.

    Raises:
        CantConvertError: A condition can't be decided; its `line` is that of the file.
    """
    branches = _Branches(loop)
    found: list[TextLine] = []
    for line in lines[loop.start + 1 : loop.end]:
        if match := _OWN_LINE.fullmatch(line.text):
            if branches.keep(match[1], line.number):
                found.append(line)
            continue
        parts = []
        for part in re.split(r"(\{%.*?%\})", line.text):
            if not part.startswith("{%"):
                parts += [part] if branches.active else []
            elif branches.keep(part, line.number):
                parts.append(part)
        if branches.active or parts:
            found.append(TextLine(number=line.number, text="".join(parts)))
    return found


class _Branches:
    """Evaluates the conditions that depend on a loop's variable; others remain."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._opened: list[list[bool] | None] = []  # [taken now, taken before]; None is not ours

    @property
    def active(self) -> bool:
        """Return whether the current text is part of the first iteration."""
        return all(frame is None or frame[0] for frame in self._opened)

    def keep(self, statement: str, number: int) -> bool:
        """Process a statement; return whether it remains in the text."""
        match = _STATEMENT.fullmatch(statement)
        kind, rest = (match[1], match[2]) if match else ("", statement)
        was_active = self.active
        if kind in ("if", "for"):
            ours = kind == "if" and was_active and self._is_ours(rest)
            value = self._decide(rest, number) if ours else False
            self._opened.append([value, value] if ours else None)
            return was_active and not ours
        frame = self._opened[-1] if self._opened else None
        if kind in ("endif", "endfor") and self._opened:
            self._opened.pop()
            return self.active and frame is None
        if frame is None:
            return was_active
        if kind == "elif":
            frame[0] = not frame[1] and self._decide(rest, number)
            frame[1] = frame[1] or frame[0]
        elif kind == "else":
            frame[0] = not frame[1]
        return was_active and kind not in ("elif", "else")

    def _is_ours(self, test: str) -> bool:
        return re.search(rf"\b({self._loop.name}|loop)\b", test) is not None

    def _decide(self, test: str, number: int) -> bool:
        value = self._loop.first
        text = re.sub(r"\s+", " ", test.strip()).strip("()")
        known = {"loop.first": 0, "loop.index0": 0, "loop.index": 1, self._loop.name: value}
        if text in ("loop.first", "not loop.first"):
            return text == "loop.first"
        match = re.fullmatch(r"([\w.]+) ?(==|!=|>=|<=|>|<) ?(\d+)", text)
        left = known.get(match[1]) if match else None
        if match is None or left is None:
            if text in (self._loop.name, f"not {self._loop.name}") and value is not None:
                return bool(value) is not text.startswith("not ")
            what = f"the condition `{test}` can't be decided for the first task"
            raise CantConvertError(what, number, f"write `{self._loop.name} == 0`")
        right = int(match[3])
        results = {"==": left == right, "!=": left != right, ">": left > right}
        results |= {"<": left < right, ">=": left >= right, "<=": left <= right}
        return results[match[2]]


class Draft:
    """A workflow file during the edit: its lines, and their YAML with the template hidden."""

    def __init__(self, name: str, lines: Sequence[TextLine]) -> None:
        self.lines = list(lines)
        text, self.restore = mask("\n".join(_hide_own_line(line.text) for line in lines))
        self.document: Document = parse_yaml(text, name, lambda line, column: (line, column))

    def value(self, path: KeyPath) -> object:
        """Return the value at a path, its `{{...}}` still hidden; None when there is none."""
        here: object = self.document.value
        for part in path:
            try:
                here = here[part]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                return None
        return here

    def index(self, path: KeyPath) -> int:
        """Return the index of the line where a list item or a key begins."""
        places = self.document.values if isinstance(path[-1], int) else self.document.keys
        return places[path][0] - 1

    def item(self, path: KeyPath) -> range:
        """Return the lines of a list item.

        Raises:
            CantConvertError: It is not written as `- ` with its keys below each other.
        """
        start = self.index(path)
        text = self.lines[start].text
        value = self.value(path)
        rows = {self.index((*path, key)) for key in value} if isinstance(value, dict) else set()
        if (
            not text.lstrip().startswith("- ")
            or not isinstance(value, dict)
            or len(rows) < len(value)
        ):
            what = "this is not written as `- ` with one key on each line"
            raise CantConvertError(what, self.lines[start].number, "write each key on its own line")
        depth = _indent(text)
        return range(start, self._end(start, depth))

    def key(self, path: KeyPath) -> range:
        """Return the lines of a key with its value."""
        start = self.index(path)
        column = self.document.keys[path][1] - 1
        return range(start, self._end(start, column, may_list=True))

    def _end(self, start: int, depth: int, *, may_list: bool = False) -> int:
        """Return the index after the last line that is deeper than `depth`."""
        end = start + 1
        for index in range(start + 1, len(self.lines)):
            text = self.lines[index].text
            if not text.strip():
                continue
            indent = _indent(text)
            if indent <= depth and text.lstrip().startswith("#"):
                continue
            is_entry = may_list and indent == depth and text.lstrip().startswith("- ")
            if indent <= depth and not is_entry:
                break
            end = index + 1
        return end


def _hide_own_line(text: str) -> str:
    match = _OWN_LINE.fullmatch(text)
    return text.replace(match[1], f"# {match[1]}") if match else text


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


@dataclass(slots=True, kw_only=True)
class TaskEdit:
    """The changes of one task."""

    draft: Draft
    path: KeyPath
    gone: set[int] = field(default_factory=set)
    added: list[str] = field(default_factory=list)
    renamed: dict[int, str] = field(default_factory=dict)

    def drop_key(self, key: str) -> None:
        """Remove a key of the task, if it exists."""
        if (*self.path, key) in self.draft.document.keys:
            self.gone |= set(self.draft.key((*self.path, key)))

    def drop_files(self, indices: Sequence[int]) -> None:
        """Remove entries of `files`, and the key with the last one."""
        entries = self.draft.value((*self.path, "files"))
        if isinstance(entries, list) and len(set(indices)) == len(entries):
            self.drop_key("files")
            return
        for index in indices:
            self.gone |= set(self.draft.item((*self.path, "files", index)))

    def add_environment(self, variables: Mapping[str, str], number: int) -> None:
        """Add variables to the task's `environment`.

        Raises:
            CantConvertError: They conflict with existing ones.
        """
        draft, key = self.draft, (*self.path, "environment")
        lines = [f"{name}: {as_scalar(value)}" for name, value in variables.items()]
        given = draft.value(key)
        if not lines or not isinstance(given, dict) or not given:
            self.added += ["environment:", *[f"  {line}" for line in lines]] if lines else []
            return
        rows = draft.key(key)
        row, column = draft.document.keys[(*key, next(iter(given)))]
        clash = next((name for name in variables if name in given), None)
        if clash is not None:
            what = f"`{clash}` is set by the script and by `environment`"
            raise CantConvertError(what, draft.lines[rows.start].number, "keep one of them")
        if row - 1 == rows.start:
            what = "the script's variables can't be added to an `environment` of one line"
            raise CantConvertError(what, number, "write each variable on its own line")
        last, pad = rows.stop - 1, " " * (column - 1)
        more = [pad + line for line in lines]
        self.renamed[last] = "\n".join([draft.lines[last].text, *more])

    def apply(self, at_key: str) -> list[TextLine]:
        """Return the lines of the whole file, with the added ones at the position of `at_key`."""
        rows = self.draft.item(self.path)
        place = self.draft.index((*self.path, at_key))
        lines = self.draft.lines
        first = lines[rows.start].text
        dash = _indent(first)
        width = len(first) - len(first[dash + 1 :].lstrip()) - dash
        pad = " " * (dash + width)
        found: list[TextLine] = []
        for index in rows:
            if index == place:
                number = lines[index].number
                found += [TextLine(number=number, text=pad + text) for text in self.added]
            if index not in self.gone:
                text = self.renamed.get(index, lines[index].text)
                text = f"{text[:dash]} {text[dash + 1 :]}" if index == rows.start else text
                found.append(TextLine(number=lines[index].number, text=text))
        start = next(i for i, line in enumerate(found) if not _is_blank(line.text))
        text = found[start].text
        found[start] = TextLine(
            number=found[start].number, text=f"{text[:dash]}-{text[dash + 1 :]}"
        )
        return [*lines[: rows.start], *found, *lines[rows.stop :]]


def _is_blank(text: str) -> bool:
    return not text.strip() or text.lstrip().startswith(("#", "{%", "{#"))


def as_scalar(text: str) -> str:
    """Return a text as YAML: plain if that is safe, else in quotes; `{{...}}` is unchanged."""
    masked, restore = mask(text)
    plain = _SAFE.fullmatch(masked) and isinstance(yaml.safe_load(masked), str)
    if plain:
        return text
    quoted = '"' + "".join(_escape(character) for character in masked) + '"'
    return restore(quoted)


def _escape(character: str) -> str:
    known = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return known.get(character) or (
        character if ord(character) > 31 else f"\\x{ord(character):02x}"
    )


def as_number(text: str) -> str:
    """Return a number of nodes or workers as YAML; `1:4` would be sixty-four without quotes."""
    masked, _ = mask(text)
    spaced = re.sub(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}", r"{{ \1 }}", text)
    return f'"{spaced}"' if ":" in masked else spaced


def list_lines(key: str, words: Sequence[str]) -> list[str]:
    """Return `key: [a, b]`, with line breaks before options when it is long."""
    parts = [as_scalar(word) for word in words]
    lead = f"{key}: ["
    lines, here = [], lead
    for index, part in enumerate(parts):
        piece = part + ("]" if index == len(parts) - 1 else ",")
        pair = piece
        if words[index].startswith("-") and index + 1 < len(parts):
            pair = f"{piece} {parts[index + 1]},"
        is_first = here == lead or not here.strip()
        if not is_first and len(here) + len(pair) > _WIDTH - 10:
            lines.append(here)
            here = " " * len(lead) + piece
        else:
            here += piece if is_first else f" {piece}"
    return [*lines, here]


def used_names(lines: Sequence[TextLine]) -> Iterator[str]:
    """Return the identifiers in the expressions and statements of a template."""
    for line in lines:
        for part in re.findall(r"\{\{.*?\}\}|\{%.*?%\}", line.text):
            yield from re.findall(r"[A-Za-z_]\w*", part)


def without_unused_values(old: Source, new: Source) -> tuple[Source, list[str]]:
    """Remove unused default values; return the file and a note for each."""
    notes: list[str] = []
    section = split_sections(new, Problems()).get("default-values")
    if section is None or re.search(r"^\s*(- )?templated:", new.text, re.MULTILINE):
        return new, notes
    before, after = (set(used_names(_workflow_lines(s))) for s in (old, new))
    defaults = default_values(section.text, new.path, section.line, Problems())
    unused = [d for d in defaults if d.name in before - after]
    lines = to_lines(new.text)
    gone: set[int] = set()
    for default in unused:
        notes.append(f"the default value `{default.name}` is removed: nothing uses it any more")
        gone |= _rows_of_value(lines, default.line - 1)
    if unused and len(unused) == len(defaults):
        end = section.line - 1 + len(to_lines(section.text))
        gone |= set(range(section.line - 1, end))
    newline = "\r\n" if "\r\n" in new.text else "\n"
    text = newline.join(line for i, line in enumerate(lines) if i not in gone)
    return replace(new, text=text.rstrip("\r\n") + newline), notes


def _rows_of_value(lines: list[str], start: int) -> set[int]:
    """Return the rows of one value, with the comment above it."""
    depth = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    while end < len(lines) and lines[end].strip():
        if len(lines[end]) - len(lines[end].lstrip()) <= depth:
            break
        end += 1
    first = start
    if " #" not in lines[start]:
        while lines[first - 1].lstrip().startswith("#"):
            first -= 1
    return set(range(first, end))


def _workflow_lines(source: Source) -> list[TextLine]:
    section = split_sections(source, Problems())["workflow"]
    return [TextLine(number=i, text=text) for i, text in enumerate(to_lines(section.text))]
