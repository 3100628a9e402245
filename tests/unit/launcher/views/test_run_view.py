"""What is said of a run of which not all is known."""

import os

from kit.values import term
from torchmuster.core.files.claims import Claims
from torchmuster.core.files.layout import RunDir
from torchmuster.launcher.views.run_view import lost_head


def test_a_run_whose_head_is_lost_says_what_the_others_wait_for(tmp_path):
    run_dir = RunDir(str(tmp_path))
    os.mkdir(run_dir.succession)
    claims = Claims(run_dir.succession)
    claims.take(term(3, members=(0, 1), next_attempt=1))
    assert lost_head(run_dir) == ()
    claims.vote(3, 1)
    (sentence,) = lost_head(run_dir)
    assert sentence.startswith("1 of 2 nodes have lost the head on n1; another one becomes it")
    assert sorted(os.listdir(run_dir.succession)) == ["lost-3.1", "term-3.json"], (
        "a view writes nothing"
    )
