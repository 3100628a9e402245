"""Says whether the scheduler says that the machine of a job's node is lost.

    node-lost RUN_DIR NODE

An agent that has lost its head asks so: exit code 0 and a sentence when it is.
"""

import sys

from torchmuster import proc
from torchmuster.files.layout import RunDir
from torchmuster.owner.jobs.answers import words_of_loss
from torchmuster.owner.jobs.succession import question_of, read_estate

_LIMIT_S = 3.0


def main(arguments: list[str]) -> int:
    """Ask, and print the answer."""
    path, node = arguments
    estate = read_estate(RunDir(path))
    question = question_of(estate.job)
    if question is None:
        return 1
    job_id = estate.allocation.job_id
    words = words_of_loss(question, job_id, node, lambda argv: proc.ask(argv, b"", _LIMIT_S))
    if words is None:
        return 1
    sys.stdout.write(f"{estate.engine} says that {node} is lost: {words}\n")
    return 0
