r"""Tables of cases in text: a line for each, whose cells stand two blanks or more apart; `\n` and `\t` are what they are in code."""

import re


def rows(text, columns=2):
    """Return the rows of a table; its last column may have blanks of any number, and what begins with `# ` is for readers."""
    lines = [line.strip() for line in text.splitlines()]
    found = [
        re.split(r" {2,}", line.replace(r"\n", "\n").replace(r"\t", "\t"), maxsplit=columns - 1)
        for line in lines
        if line and not line.startswith("# ")
    ]
    assert all(len(row) == columns for row in found), found
    return found


def words(text):
    """Return the words of a text: a list of names, of which none has a blank."""
    return text.split()
