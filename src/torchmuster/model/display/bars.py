"""What a progress bar says, in its own words: `37%|###7  | 369/1000 [00:12<00:21, 30.1it/s]`.

A script without the training library does not say how far it is, but its own bar may. Only tqdm's form, and that of
the libraries that imitate it, is understood: a count, a total and a speed that stand in one line. Anything else is
no progress.
"""

import re
from dataclasses import dataclass

_BAR = re.compile(
    r"(?P<done>\d{1,15})/(?P<total>\d{1,15})\s*\[(?P<spent>[\d:]+)<(?P<left>[\d:?]+),"
    r"\s*(?P<rate>[\d.]+|\?)\s?(?P<unit>[^\s,\]/]{1,12}/s|s/[^\s,\]/]{1,12})"
)
_MAX_LINES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class BarWords:
    """What a bar says.

    Attributes:
        speed: `30.1it/s`, as it stands there.
        left: `00:21`, as it stands there; empty where the bar does not know.
    """

    done: int
    total: int
    speed: str
    left: str


def read_bar(text: str) -> BarWords | None:
    """Return the state of the last bar at the end of a log; None where there is none."""
    lines = re.split(r"[\r\n]", text)[-_MAX_LINES:]
    for line in reversed(lines):
        found = _BAR.search(line)
        if found is not None and 0 < int(found["total"]) >= int(found["done"]):
            left, rate = found["left"], found["rate"]
            return BarWords(
                done=int(found["done"]),
                total=int(found["total"]),
                speed="" if rate == "?" else f"{rate}{found['unit']}",
                left="" if "?" in left else left,
            )
    return None
