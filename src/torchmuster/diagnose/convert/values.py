"""The values of a template that a conversion leaves without a use, for `muster convert`."""

import re
from dataclasses import replace

from torchmuster.diagnose.convert.edits import TextLine, used_names
from torchmuster.spec.problems import Problems
from torchmuster.spec.source import Source
from torchmuster.spec.values import default_values
from torchmuster.spec.workflow.sections import split_sections, to_lines


def without_unused_values(old: Source, new: Source) -> tuple[Source, list[str]]:
    """Leave out the default values that nothing uses any more; return the file and a note for each."""
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
        notes.append(f"the default value `{default.name}` is gone: nothing uses it any more")
        gone |= _rows_of_value(lines, default.line - 1)
    if unused and len(unused) == len(defaults):
        end = section.line - 1 + len(to_lines(section.text))
        gone |= set(range(section.line - 1, end))
    newline = "\r\n" if "\r\n" in new.text else "\n"
    text = newline.join(line for i, line in enumerate(lines) if i not in gone)
    return replace(new, text=text.rstrip("\r\n") + newline), notes


def _rows_of_value(lines: list[str], start: int) -> set[int]:
    """Return the rows of one value, with the comment above that speaks of it alone."""
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
