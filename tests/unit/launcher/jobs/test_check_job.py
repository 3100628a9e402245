"""The test job of `muster engines check`: what ends the wait for it."""

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.verdict import Report
from torchmuster.core.owner.create import failed_before_start
from torchmuster.launcher.cli.engine_job import JobWatch
from torchmuster.launcher.model.job import JobState, JobView


def test_a_test_job_that_can_never_start_is_not_waited_for(tmp_path):
    run_dir = RunDir(str(tmp_path))
    held = JobView(job_id="3.ctl", state=JobState.HELD, reason="job held")
    watch = JobWatch(run_dir, lambda _: held, lambda _: None, submitted_at=0.0, timeout_s=1e9)
    never = Report(error="job 3.ctl can never start: it could not be started 20 times")

    class Never:
        def cancel_if_hopeless(self, run_dir):
            plain = codec.to_plain(failed_before_start(run_dir, 14, never))
            atomic.write_json(run_dir.result, plain)

    watch._never = Never()

    assert watch.follow()
    assert watch.result.report == never
