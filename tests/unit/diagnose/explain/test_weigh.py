"""A cause is certain only while no rival has evidence of its own, or stands in the message itself."""

from dataclasses import replace

from torchmuster.diagnose.explain.events import LogFinding, LogLine
from torchmuster.diagnose.explain.judge import weighed
from torchmuster.diagnose.finding import Confidence


def finding(cause, weight=80, order=5, confidence=Confidence.HIGH, **more):
    began = LogLine(path="job.log", number=order, text=cause, order=order)
    return LogFinding(
        cause=cause, error=cause, weight=weight, confidence=confidence, began=began, **more
    )


def test_nothing_beside_it_leaves_a_proof_certain():
    assert weighed([finding("disk-full")])[0].confidence is Confidence.HIGH
    assert weighed([]) == []


def test_a_message_with_a_second_reading_is_not_certain_and_names_it():
    first = weighed([finding("ib-path", rivals=("peer-lost",))])[0]
    assert first.confidence is Confidence.MEDIUM
    assert first.rivals == ("peer-lost",)


def test_another_cause_of_like_weight_that_began_before_shakes_it():
    first = weighed([finding("no-gpu", order=9), finding("disk-full", weight=78, order=2)])[0]
    assert first.confidence is Confidence.MEDIUM
    assert first.rivals == ("disk-full",)


def test_guesses_lighter_causes_and_later_ones_do_not_shake_it():
    others = [
        finding("peer-lost", order=2, confidence=Confidence.LOW),
        finding("exit-code", weight=40, order=2),
        finding("no-gpu", order=30),
        finding("disk-full", order=1),
    ]
    assert weighed([finding("disk-full"), *others])[0].confidence is Confidence.HIGH


def test_where_both_have_times_these_decide():
    late = finding("no-gpu", order=2)
    early = finding("disk-full", order=9)
    late = replace(late, began=replace(late.began, when=100.0))
    early = replace(early, began=replace(early.began, when=50.0))
    assert weighed([late, early])[0].confidence is Confidence.MEDIUM
    assert weighed([early, late])[0].confidence is Confidence.HIGH
