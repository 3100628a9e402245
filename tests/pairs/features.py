"""The table of features: what can be asked for at once, and which pairs mean nothing.

A case has one value of each feature; the first value of each is what one gets without asking. What starts where is not said
here: it is read from docs/where.md, whose every cell another test decides.
"""

from pathlib import Path

FEATURES = {
    "what": ("run", "sweep", "workflow", "launch", "torchrun"),
    "where": ("here", "session", "hosts", "apart"),  # hosts that share a disk, or nothing
    "nodes": ("1", "2", "1:2"),
    "workers": ("1", "2"),
    "spares": ("0", "1"),
    "start": ("auto", "fresh"),
    "tee": ("0", "all", "none"),
    "detach": ("no", "yes"),
    "called": ("script", "name", "id"),
    "more": ("none", "preload", "metrics", "env", "tensorboard"),
    "memory": ("none", "1"),
    "verify": ("none", "3"),
    "every": ("3", "1", "50"),
    "model": ("whole", "sharded"),
    "readers": ("0", "2"),
    "evaluate": ("no", "yes"),
    "nan": ("none", "skip", "ignore"),
    "fault": ("none", "kill", "raise", "exit", "hang"),
    "place": ("step", "behind", "evaluation"),
    "rank": ("0", "-1"),
    "look": ("after", "during"),
    "end": ("itself", "INT", "TERM", "TERM TERM", "HUP", "cancel", "kill"),
}
OFF = {feature: values[0] for feature, values in FEATURES.items()}

# Whom the page calls otherwise.
ROWS = {
    "run": "`muster run`",
    "sweep": "`muster sweep`",
    "workflow": "`muster submit`",
    "launch": "`torchmuster.launch`",
    "torchrun": "`muster torchrun`",
}
COLUMNS = {"apart": "hosts"}
HOSTS = ("hosts", "apart")
PAGE = Path(__file__).parents[2] / "docs" / "where.md"

# A member of one worker, which is not tried again.
FAILED_MEMBER = {
    "what": "sweep",
    "workers": "1",
    "where": "here",
    "fault": "kill, raise, exit",
}
# What can't be asked for, or would ask for nothing: a case that has one of the values of each feature of a line.
NOTHING = (
    # what a command has no option for
    {"what": "sweep, workflow, launch, torchrun", "tee": "all, none"},
    {"what": "sweep, workflow, torchrun", "spares": "1"},
    {"what": "sweep, workflow, torchrun", "verify": "3"},
    {"what": "sweep, torchrun", "nodes": "2, 1:2"},
    {"what": "launch, torchrun", "detach": "yes"},
    {"what": "torchrun", "called": "name, id"},
    {"what": "workflow", "called": "name"},
    {"what": "workflow, torchrun", "start": "fresh"},
    {"what": "sweep, workflow, torchrun", "more": "metrics"},
    {"what": "workflow, torchrun", "more": "preload"},
    {"what": "torchrun", "more": "env"},
    # what is refused, as other tests see
    {"where": "session", "spares": "1"},
    {"nodes": "1:2", "spares": "1"},
    {"nodes": "1", "spares": "1"},  # one host has no place for another
    {"nodes": "1", "verify": "3"},
    {"model": "sharded", "verify": "3"},
    {"where": "apart", "model": "sharded"},
    {"where": "apart", "what": "workflow"},
    # where nobody waits, nobody hangs; without `--hang-timeout` the limit is a minute
    {"fault": "hang", "nodes": "1", "workers": "1"},
    {"fault": "hang", "what": "sweep, workflow"},
    # a place without a fault, an evaluation that there is not
    {"fault": "none", "place": "behind, evaluation"},
    {"fault": "none", "rank": "-1"},
    {"evaluate": "no", "place": "evaluation"},
    # nobody looks at, or ends, what has failed
    {**FAILED_MEMBER, "end": "INT, TERM, TERM TERM, HUP, cancel, kill"},
    {**FAILED_MEMBER, "look": "during"},
    # nobody presses Ctrl-C, or closes the terminal, of what is in the background
    {"detach": "yes", "end": "INT, HUP"},
    # a Python that ends leaves its run alone
    {"what": "launch", "end": "INT, TERM, TERM TERM, HUP, kill"},
)


def cells():
    """Return the cells of docs/where.md as `{(row, column): text}`."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    split = [[word.strip() for word in line.strip("|").split("|")] for line in lines]
    (_, *columns), _, *rows = split
    return {
        (row, to): text for row, *texts in rows for to, text in zip(columns, texts, strict=True)
    }


_CELLS = cells()
_NOTHING = [
    [(feature, set(texts.split(", "))) for feature, texts in line.items()] for line in NOTHING
]


def why_not(case):
    """Return why a case, or the beginning of one, can't be; None where it can."""
    for line in _NOTHING:
        if all(case.get(feature) in values for feature, values in line):
            return f"it means nothing: {line}"
    if {"what", "where"} <= case.keys():
        row, column = ROWS[case["what"]], COLUMNS.get(case["where"], case["where"])
        rows = [row, row[:-1] + " --detach`"] if case.get("detach") == "yes" else [row]
        for one in rows:
            if _CELLS[one, column] != "yes":
                return f"docs/where.md: {one} {column}: {_CELLS[one, column]}"
    return None


def whole(asked):
    """Return the case that asks for these values and for nothing else."""
    return OFF | asked


def named(case):
    """Return the case as words of a command line: what is asked for."""
    return (
        " ".join(f"{k}={v.replace(' ', '+')}" for k, v in case.items() if v != OFF[k]) or "what=run"
    )


def read(words):
    """Return the case of such words.

    Raises:
        ValueError: There is no such feature or value.
    """
    asked = {}
    for word in words:
        feature, _, value = word.partition("=")
        value = value.replace("+", " ")
        if value not in FEATURES.get(feature, ()):
            raise ValueError(
                f"`{word}`: features are {', '.join(FEATURES)}, and {feature}: {FEATURES.get(feature)}"
            )
        asked[feature] = value
    return whole(asked)
