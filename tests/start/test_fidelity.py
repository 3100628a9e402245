"""A worker finds what a freshly started script finds, but for the closed list of docs/workers.md, and numbers of its own."""

import pytest

from start.ways import FORKED, FRESH, PLAIN

# Facts that differ; each has its test in test_differences.py.
TORCH_IS_THERE = {"modules at start", "resident kB", "Threads at start", "SigCgt at start"}
PROCESS = {"command line", "environment in /proc", "leads its session", "parent"}
STACKS = {"SigCgt at start", "SigCgt after import torch", "open descriptors"}
EVERYWHERE = STACKS | {
    "environment",
    "stdout: line_buffering",
    "depth of the stack",
    "hash of a string",
}
DIFFERENT = {
    FORKED: EVERYWHERE | PROCESS | TORCH_IS_THERE | {"frozen objects"},
    FRESH: EVERYWHERE | PROCESS | {"modules at start", "resident kB"},
}
# The starter has imported the debugger, and the standard library that it needs itself.
OF_THE_STARTER = {"pdb", "bdb", "cmd", "code", "codeop"}


def differences(one: dict, other: dict) -> dict:
    """Return the facts that differ, with both values."""
    names = sorted(set(one) | set(other))
    pairs = {name: (one.get(name), other.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def without_the_starter(facts: dict) -> dict:
    modules = set(facts["modules after import torch"]) - OF_THE_STARTER
    return {**facts, "modules after import torch": sorted(modules)}


@pytest.mark.parametrize("way", [FORKED, FRESH])
def test_every_fact_but_the_listed_is_that_of_plain_python(facts, way):
    plain, ours = without_the_starter(facts[PLAIN]), without_the_starter(facts[way])
    found = differences(plain, ours)
    assert {name: pair for name, pair in found.items() if name not in DIFFERENT[way]} == {}


def test_every_fact_but_the_listed_is_that_of_plain_python_with_flags(facts_with_flags):
    facts = {way: without_the_starter(found) for way, found in facts_with_flags.items()}
    found = differences(facts[PLAIN], facts[FORKED])
    listed = DIFFERENT[FORKED] - {"stdout: line_buffering"}
    assert {name: pair for name, pair in found.items() if name not in listed} == {}
    assert facts[FORKED]["stdout: write_through"] is True


@pytest.mark.parametrize(("way", "word"), [(FORKED, "spawner"), (FRESH, "worker")])
def test_the_worker_was_started_in_the_way_that_is_compared(facts, way, word):
    command = facts[way]["command line"]
    assert command[1].endswith("/spawner/entry.py")
    assert command[2] == word


def test_no_generator_gives_two_ranks_or_two_attempts_the_same(numbers):
    assert len(numbers) == 8
    drawn = {name: {str(one[name]) for one in numbers} for name in numbers[0]}
    for shared in ("Python's hashes", "an address", "OMP_NUM_THREADS"):  # test_differences.py
        del drawn[shared]
    assert {name: len(values) for name, values in drawn.items()} == dict.fromkeys(drawn, 8)
