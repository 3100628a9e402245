"""Tables of cases in text: a line for each, whose cells stand two blanks or more apart."""

import re


def rows(text, columns=2):
    """Return the rows of a table; the last cell of a line may have blanks of any number."""
    lines = (line.strip() for line in text.splitlines())
    found = [re.split(r" {2,}", line, maxsplit=columns - 1) for line in lines if line]
    assert all(len(row) == columns for row in found), found
    return found
