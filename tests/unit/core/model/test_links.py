"""Which links a run may still have."""

from torchmuster.core.model import codec
from torchmuster.core.model.links import Link, Links, may_be_followed

FIRST = Link(job_id="0.ctl")


def test_a_run_is_followed_while_a_link_is_left_and_its_head_has_not_ended_it():
    assert may_be_followed(codec.to_plain(Links(most=2, links=(FIRST,))))
    assert not may_be_followed(codec.to_plain(Links(most=1, links=(FIRST,))))
    assert not may_be_followed(codec.to_plain(Links(most=2, links=(FIRST,), ended="cancelled")))
    assert not may_be_followed(None)
