"""Own a run on the nodes of a session, which are reached through the session's head."""

import os
from collections.abc import Callable

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.owner_policy import JobTime
from torchmuster.core.model.plan import WARN_S, RunPlan
from torchmuster.core.model.verdict import Result
from torchmuster.core.node.options import leave_environment
from torchmuster.core.owner.create import note_failed_start
from torchmuster.core.owner.parts import Deadline, RunDisplay
from torchmuster.core.owner.supervise import own_run
from torchmuster.errors import ChannelError
from torchmuster.launcher.engines.schedulers import set_by_schedulers
from torchmuster.launcher.engines.ssh import SshEngine, SshOptions
from torchmuster.launcher.engines.ssh_command import SshHost
from torchmuster.launcher.engines.ssh_host import Bundle
from torchmuster.launcher.model.run import record_of
from torchmuster.launcher.views.find import view_run
from torchmuster.multirun.engine import HeldSession
from torchmuster.multirun.views.session_route import SessionRoute
from torchmuster.multirun.views.sessions import plan_of, why_gone

_PATIENCE_S = 20.0  # torch is imported before a server opens again


def is_elsewhere(held: HeldSession) -> bool:
    """Return whether the nodes of a session are, or may be, other machines."""
    return plan_of(held.run_dir).engine != "local"


def own_on_nodes(
    plan: RunPlan,
    run_dir: RunDir,
    held: HeldSession,
    voice: RunDisplay,
    *,
    begun: Callable[[RunPlan], None] = lambda _: None,
    first_attempt: int = 0,
) -> Result:
    """Start a run on the nodes of a session and own it until it ends.

    Args:
        plan: The plan of the run.
        run_dir: The run directory.
        held: The session.
        voice: Shows the run.
        begun: Called with the settled plan when the agents have been started.
        first_attempt: The number of the first attempt.

    Raises:
        UsageError: Another run is in the session.
        ChannelError: The session, or a node of it, can't be reached.
    """
    of_session = plan_of(held.run_dir)
    way = SessionRoute(view_run(held.run_dir), held.lives, _PATIENCE_S)
    wishes = SshOptions(
        hosts=tuple(SshHost(name=name) for name in of_session.node_names[: plan.max_nodes]),
        where=f"--session {held.name}",
        by_slots=False,
        may_share=os.environ.get("MUSTER_SSH_SHARED", "") != "no",
    )
    of_job = of_session.job_id is not None or os.path.isfile(held.run_dir.job)
    if of_job:  # its nodes see our files, so they get our variables too
        leave_environment(run_dir.environment, set_by_schedulers())
    bundle = Bundle(ssh=(), sha="", root="", files=(), way=way)
    engine = SshEngine(plan, run_dir, wishes, bundle, voice.say)
    ends_at = record_of(held.run_dir).ends_at
    deadline = Deadline(JobTime(WARN_S, ends_at)) if ends_at is not None else None
    try:
        with note_failed_start(run_dir):
            try:
                engine.start_all(first_attempt=first_attempt)
            except ChannelError as error:
                raise why_gone(held, error) from error
        begun(engine.plan)
        result = own_run(
            engine, voice, deadline=deadline, forward_stdin=plan.stdin_rank is not None
        )
        engine.finish()
        return engine.localized(result)
    finally:
        engine.abandon()
        way.close()
