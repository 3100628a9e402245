"""A finding is printed in the form of every message, and the worst stands first."""

from torchmuster.diagnose.finding import Finding, Level, render, worst_first


def finding(level=Level.WARNING, **more):
    return Finding(level=level, cause="c", error="e", **more)


def test_a_finding_has_the_form_of_every_message_with_its_level_first():
    told = finding(at="n1", because=("b", "more"), hint="h")
    assert render(told) == "warning: e\n  at: n1\n  because: b\n    more\nhint: h\n"
    assert render(finding(), "error") == "error: e\n"


def test_the_worst_comes_first():
    note, failure = finding(Level.NOTE, weight=9), finding(Level.FAILURE)
    certain = finding(Level.FAILURE, is_certain=True)
    heavy = finding(Level.FAILURE, weight=1)
    assert worst_first([note, failure, heavy, certain]) == [certain, heavy, failure, note]
