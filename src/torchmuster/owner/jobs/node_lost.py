"""Says whether the scheduler says that the machine of a job's node is lost.

    node-lost RUN_DIR NODE

An agent that has lost its head asks so: exit code 0 and a sentence when it is.
"""

import sys

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.files.layout import RunDir
from torchmuster.owner.jobs.succession import question_of, read_estate

_LIMIT_S = 3.0


def main(arguments: list[str]) -> int:
    """Ask, and print the answer."""
    path, node = arguments
    estate = read_estate(RunDir(path))
    question = question_of(estate.job)
    for argv in question.argv_for(estate.allocation.job_id, node) if question is not None else ():
        try:
            answer = proc.ask(argv, b"", _LIMIT_S)
        except MusterError:
            continue
        text = answer.stdout.decode(errors="replace") if answer.status == 0 else ""
        words = question.is_lost(text, node) if question is not None else None
        if words is not None:
            sys.stdout.write(f"{estate.engine} says that {node} is lost: {words}\n")
            return 0
    return 1
