"""Turns the facts of all nodes into findings, worst first.

The module is pure, so that tests can try every rule on made-up nodes. Levels are chosen so that an
ordinary container, laptop or cluster gives notes only. A finding ends a run (`is_certain`) in three
cases: torch of another minor version or missing on some nodes, a script that is missing on some
nodes, and, in the long form, nodes that can't reach each other.
"""

from collections.abc import Iterator, Sequence

from torchmuster.diagnose.doctor import rules_environment, rules_gpu, rules_network, rules_system
from torchmuster.diagnose.doctor.checks import TEXTS
from torchmuster.diagnose.doctor.show import Rule, Situation
from torchmuster.diagnose.finding import Finding, Level, names_of, worst_first

_PARTS = {
    "system": "kernel and limits",
    "network": "names and interfaces",
    "files": "folders",
    "gpu": "GPUs",
    "environment": "variables",
}


def compare(situation: Situation) -> list[Finding]:
    """Return all findings, worst first."""
    found = [finding for rule in RULES for finding in rule(situation)]
    return worst_first(found)


def untold(situation: Situation) -> Iterator[Finding]:
    """Report facts that could not be collected: a missing answer is not a good one."""
    silent = [node for node in situation.nodes if node.facts is None]
    level = Level.WARNING if situation.is_long and situation.has_machines else Level.NOTE
    if silent:
        yield TEXTS["unknown-node"].finding(
            [],
            level=level,
            names=names_of([n.name for n in silent]),
            whys=list(dict.fromkeys(n.why_not for n in silent if n.why_not))[:4],
        )
    for part, words in _PARTS.items():
        why = {
            n.name: n.facts.unknown[part]
            for n in situation.nodes
            if n.facts and part in n.facts.unknown
        }
        if why:
            slow = part == "files" and all("no answer" in text for text in why.values())
            name = "file-system-hangs" if slow else "unknown-part"
            yield TEXTS[name].finding(
                list(why),
                level=Level.WARNING if part == "files" else level,
                part=words,
                whys=list(dict.fromkeys(why.values()))[:4],
            )


RULES: Sequence[Rule] = (
    untold,
    *rules_environment.VERSION_RULES,
    *rules_gpu.MATRIX_RULES,
    *rules_network.RULES,
    *rules_system.RULES,
    *rules_system.FILE_RULES,
    *rules_gpu.RULES,
    *rules_network.FABRIC_RULES,
    *rules_environment.RULES,
)


def exit_code(findings: Sequence[Finding], *, could_tell: bool = True) -> int:
    """Return 0 without problems, 1 for warnings, 2 for failures, 3 for an incomplete check."""
    levels = {finding.level for finding in findings}
    if Level.FAILURE in levels:
        return 2
    if not could_tell:
        return 3
    return 1 if Level.WARNING in levels else 0
