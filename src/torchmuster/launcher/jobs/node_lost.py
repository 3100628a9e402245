"""Ask the scheduler whether the node of a job is lost.

An agent that has lost its head runs this: if so, it exits with code 0 and prints a sentence.
"""

import sys

from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.codec import from_arguments
from torchmuster.core.model.succession import NodeLostOrder
from torchmuster.launcher.jobs.answers import find_node_loss
from torchmuster.launcher.jobs.succession import question_of, read_estate

_LIMIT_S = 3.0


def main(arguments: list[str]) -> int:
    """Ask, and print the answer; return 0 if the node is lost, else 1."""
    asked = from_arguments(NodeLostOrder, arguments)
    estate, node = read_estate(RunDir(asked.run_dir)), asked.node
    question = question_of(estate.job)
    if question is None:
        return 1
    job_id = estate.allocation.job_id
    words = find_node_loss(question, job_id, node, lambda argv: proc.ask(argv, b"", _LIMIT_S))
    if words is None:
        return 1
    sys.stdout.write(f"{estate.words.engine} says that {node} is lost: {words}\n")
    return 0
