"""The matrix as JSON and as a page of Markdown, and where both are kept: `docs/`."""

import json
from pathlib import Path

from matrix.faults import FAULTS
from matrix.worlds import WORLDS

REPOSITORY = Path(__file__).resolve().parents[2]
JSON, PAGE = (REPOSITORY / name for name in ("docs/matrix.json", "docs/matrix.md"))
NOT_RUN = {"word": "not run"}
TEXT = """\
# Twelve faults on every engine

`make matrix` makes each fault in a real run of 2 nodes x 2 workers (`tests/matrix/train.py`, which knows of no fault), from
outside, and judges what follows. A time is that from the fault until the terminal named the cause; of a fault that is there
before the start, from the script's first line. The cell is a time only if

- the terminal named the right first cause within 5 s, and within 20 s where only silence can tell (a lease of 15 s);
- the record (`result.json`) has the right state, kind of end, rank and node;
- nothing was left within 20 s: no process on any node or at the user's place, no job of the scheduler, no file in `/tmp`,
  `/dev/shm` or the home of a node. Run directories and the copy of torchmuster for jobs are kept on purpose. Where an agent
  died with its node, or a scheduler killed it for its node, the next run there has to remove what it had in `/tmp`.

On Kubernetes nothing left means no Job, Service, Secret or pod, and no folder of a pod on its node; a port of a pod is taken by
others only with `host_network = true`, which this one fault is made with. The column is made where `KUBE_BIN` is set
([kubernetes.md](kubernetes.md#proved-on-a-real-cluster)).

`--max-restarts 0`: the verdict is judged, not what a restart makes good ([faults.md](faults.md)).

{table}
| fault | how it is made |
|---|---|
{made}

| engine | what it runs on |
|---|---|
{worlds}

Where a link is cut, the workers have to be dead while it is. The agent waits for the link, as long as for any node that is to
join (`--join-timeout`), so the link comes back when the scheduler's job has ended, and the agent has to go.

Made on:

{machines}
"""


def read():
    """Return what is known: for each engine its machine and its cells."""
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def write(document):
    """Keep it, as JSON and as a page."""
    JSON.write_text(json.dumps(document, indent=1) + "\n")
    PAGE.write_text(page(document))


def page(document):
    """Return the page of the matrix."""
    machines = [
        f"- {_of(document, name)[0]}: {_facts(known['machine'])}"
        for name, known in document.items()
    ]
    return TEXT.format(
        table=table(document),
        made="\n".join(_row([fault.title, fault.made]) for fault in FAULTS),
        worlds="\n".join(_row(_of(document, name)) for name in WORLDS),
        machines="\n".join(machines),
    )


def _of(document, name):
    """Return the title of a column and what its world was made of: PBS may have been real, or pretended."""
    known, world = document.get(name, {}), WORLDS[name]
    return known.get("title", world.title), known.get("made_of", world.made_of)


def _facts(machine):
    return ", ".join(f"{key} {value}" for key, value in machine.items())


def table(document):
    """Return the matrix with its footnotes."""
    notes = []
    lines = [
        _row(["fault", *(_of(document, name)[0] for name in WORLDS)]),
        "|---" * (1 + len(WORLDS)) + "|",
    ]
    for fault in FAULTS:
        cells = [
            document.get(name, {}).get("cells", {}).get(fault.name, NOT_RUN) for name in WORLDS
        ]
        lines.append(_row([fault.title, *(_with_note(cell, notes) for cell in cells)]))
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines).rstrip() + "\n"


def words(cell):
    """Return what the table says of a cell, without its footnote."""
    if cell["word"] == "failed":
        return f"**FAILED**: {cell['why']}"
    if cell["word"] == "impossible":
        return "-"
    return f"{cell['shown_s']:.1f} s" if cell["word"] == "ok" else "not run"


def _row(parts):
    return f"| {' | '.join(parts)} |"


def _with_note(cell, notes):
    note = cell.get("note") if cell["word"] in ("ok", "failed") else cell.get("why")
    if not note:
        return words(cell)
    if note not in notes:
        notes.append(note)
    return f"{words(cell)} ({notes.index(note) + 1})"
