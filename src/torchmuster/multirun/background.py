"""Own a run in a session in the background."""

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.plan import RunPlan


def own_in_session(plan: RunPlan, run_dir: RunDir) -> int:
    """Own a run whose agents the servers of a session fork; return its exit code.

    Raises:
        NotFoundError: The session has ended.
    """
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.node.kernel import visible_gpus
    from torchmuster.core.owner.create import note_failed_start
    from torchmuster.core.owner.record import next_attempt
    from torchmuster.core.owner.supervise import own_run
    from torchmuster.multirun.views.sessions import find_session

    voice = TerminalVoice()
    voice.start()
    with note_failed_start(run_dir):
        held = find_session(plan.session or "")
    attempt = next_attempt(run_dir)
    if plan.engine != "local":
        from torchmuster.multirun.held import own_on_nodes

        result = own_on_nodes(plan, run_dir, held, voice, first_attempt=attempt)
    else:
        from torchmuster.multirun.engine import SessionEngine

        gpus = tuple(visible_gpus())
        engine = SessionEngine(plan, run_dir, gpus, session=held, say=voice.say)
        with note_failed_start(run_dir):  # a sweep starts members again
            engine.start_all(first_attempt=attempt)
        result = own_run(engine, voice)
    voice.flush(5.0)
    return result.exit_code
