r"""Data files of the package, with one paragraph per entry, read in one pass.

    # A comment.
    source: NCCL 2.7 to 2.30, src/init.cc

    [nccl.rank-twice]
    says: rank (?P<rank>\d+) of \d+ ranks has already checked in
    says: ...
    error: two ranks say that they are rank {rank}

A paragraph without a name adds its fields to all that follow, until the next one without a name; a
paragraph's own fields override them. A value is the rest of its line, verbatim; a repeated field
has several values. `let NAME: VALUE` in a paragraph without a name defines a piece of text, which
`<<NAME>>` inserts in the rest of the file.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LET = "let "
_NAMED = re.compile(r"<<([\w-]+)>>")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One paragraph.

    Attributes:
        where: The file's name, and the line of the paragraph's name.
    """

    name: str
    where: str
    fields: Mapping[str, Sequence[str]]

    def one(self, field: str, default: str = "") -> str:
        """Return the first value of a field; `default` without one."""
        values = self.fields.get(field)
        return values[0] if values else default

    @property
    def table(self) -> dict[str, str]:
        """The first value of each field: a paragraph that lists names, with what each stands for."""
        return {field: values[0] for field, values in self.fields.items()}

    @property
    def words(self) -> frozenset[str]:
        """The words of the field `words`, in all its lines."""
        return frozenset(" ".join(self.fields["words"]).split())


def read_paragraphs(path: str, names: Mapping[str, str] | None = None) -> list[Paragraph]:
    """Return the paragraphs of a file in order.

    Args:
        path: The file.
        names: Pieces of text by name, in addition to those in the file.

    Raises:
        ValueError: A line is neither empty, a comment, a name nor a field; a name is duplicate or
            unknown.
    """
    with open(path, encoding="utf-8") as file:
        lines = file.read().split("\n")
    named = dict(names or {})
    found: dict[str, Paragraph] = {}
    defaults: dict[str, list[str]] = {}
    fields, is_open = defaults, False
    for number, line in enumerate(lines, 1):
        where = f"{os.path.basename(path)}, line {number}"
        if not line:
            is_open = False
        elif line[0] == "#":
            continue
        elif line[0] == "[" and line[-1] == "]":
            name = line[1:-1]
            if name in found:
                raise ValueError(f"{where}: {name} is there twice")
            fields, is_open = {}, True
            found[name] = Paragraph(name, where, fields)
            fields.update(defaults)
            own = set[str]()
        else:
            key, colon, value = line.partition(": ")
            if not colon:
                raise ValueError(f"{where}: neither a name nor a field: {line}")
            if "<<" in value:
                if unknown := set(_NAMED.findall(value)) - named.keys():
                    raise ValueError(f"{where}: nothing is called {', '.join(sorted(unknown))}")
                value = _NAMED.sub(lambda match: named[match[1]], value)
            if not is_open:  # applies to all that follow
                fields, is_open, own = (defaults := {}), True, set()
            if key.startswith(_LET):
                named[key.removeprefix(_LET)] = value
            elif key in own:
                fields[key].append(value)
            else:
                own.add(key)
                fields[key] = [value]
    return list(found.values())
