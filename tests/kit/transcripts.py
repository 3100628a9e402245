"""Golden transcripts: a file for each topic below tests/golden, in it a section for each case.

===== name_of_the_case
what the program said, word for word
"""

import re
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"
_HEAD = re.compile(r"^===== (.+)\n", re.MULTILINE)


def read_sections(name):
    """Return the texts of one transcript by the names of their cases; none where there is no file."""
    path = GOLDEN / name
    if not path.exists():
        return {}
    _, *found = _HEAD.split(path.read_text())
    names, texts = found[::2], found[1::2]
    assert len(set(names)) == len(names), f"a case stands twice in {name}"
    # A blank line stands between two sections, none behind the last.
    texts[:-1] = [text.removesuffix("\n") for text in texts[:-1]]
    return dict(zip(names, texts, strict=True))


def write_section(name, case, text):
    """Put the text of one case into its place, a new case behind the others."""
    path = GOLDEN / name
    path.parent.mkdir(parents=True, exist_ok=True)
    sections = read_sections(name) | {case: text}
    path.write_text("\n".join(f"===== {case}\n{text}" for case, text in sections.items()))
