"""What the tests of workflow files share: write one, load it, find a message."""

import textwrap

from torchmuster.launcher.spec.scalars import FileProblems
from torchmuster.workflow.spec.load import LoadOptions, load_workflow

ONE_TASK = "tasks:\n- name: train\n  command: [python, train.py]\n"


def load(folder, body, **options):
    """Load a file whose `workflow:` has a name and this body."""
    path = folder / "train.yaml"
    path.write_text("workflow:\n  name: digits\n" + textwrap.indent(textwrap.dedent(body), "  "))
    return load_workflow(LoadOptions(path=str(path), **options))


def one(found, words):
    """Return the one message of errors or findings that holds these words."""
    if isinstance(found, FileProblems):
        found = [*found.errors, *found.warnings]
    hits = [message for message in found if words in message.what]
    assert len(hits) == 1, [message.what for message in found]
    return hits[0]
