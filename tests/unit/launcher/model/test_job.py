from torchmuster.launcher.model.job import JobRequest, JobState, NodeChunk


def request(**given):
    return JobRequest(name="j", head=("/x",), log_path="/l", **given)


def test_states_that_may_come_back_are_not_final():
    waiting = {state for state in JobState if not state.is_final}
    assert {JobState.REQUEUED, JobState.UNKNOWN, JobState.ENDING} <= waiting
    assert JobState.FAILED.is_final
    assert JobState.PREEMPTED.is_final  # Slurm shows a requeued one as pending


def test_nodes_of_all_chunks_count():
    assert request(chunks=(NodeChunk(num_nodes=3), NodeChunk())).num_nodes == 4


def test_most_nodes_hold_where_there_is_a_range():
    assert request(chunks=(NodeChunk(num_nodes=2),), max_nodes=6).num_nodes == 6
