"""The form of a check: which nodes are told together, and of which of them its words are."""

from torchmuster.diagnose.doctor.checks import LONG, Check, CheckText, Equal
from torchmuster.diagnose.finding import Level
from unit.diagnose.doctor.made_up import node, situation

ROW = CheckText(of="system", cause="c", error="{nodes} {has} {facts.num_cpus}")
NODES = [node(k, system={"num_cpus": cpus}) for k, cpus in ((1, 4), (2, 2), (3, 64))]


def told(row, **more):
    return [(f.level, f.error) for f in row(situation(*NODES, **more))]


def is_small(seen):
    return seen.facts.num_cpus < 8


def level_of(seen):
    return {4: Level.NOTE, 2: Level.FAILURE}.get(seen.facts.num_cpus)


def test_nodes_with_one_fault_are_one_finding():
    assert told(Check(ROW, bad=is_small)) == [(Level.NOTE, "n1 and n2 have 4")]


def test_the_words_are_about_the_worst_node():
    row = Check(ROW, bad=is_small, worst=lambda s: s.facts.num_cpus)
    assert told(row) == [(Level.NOTE, "n1 and n2 have 2")]


def test_nodes_are_told_apart_by_how_bad_it_is_and_where_each_counts():
    apart = [(Level.NOTE, "n1 has 4"), (Level.FAILURE, "n2 has 2")]
    assert told(Check(ROW, level=level_of)) == apart
    row = Check(ROW, bad=is_small, each=True)
    assert [text for _, text in told(row)] == ["n1 has 4", "n2 has 2"]


def test_a_check_of_the_long_form_is_quiet_before_a_start():
    row = Check(ROW, bad=is_small, when=LONG)
    assert told(row, is_long=False) == []


def test_values_that_should_be_equal_are_told_with_who_has_what():
    row = Equal(
        CheckText(of="system", cause="c", what="CPUs", error="they differ: {text}"),
        value=lambda s: s.facts.num_cpus if s.node.name != "n3" else None,
    )
    assert told(row) == [(Level.NOTE, "they differ: n1 has CPUs 4, n2 has CPUs 2")]
