"""The order for an agent that a door forks: what the command line and the variables of a process would have said."""

import os
from collections.abc import Mapping
from dataclasses import replace

from torchmuster.model.codec import to_words
from torchmuster.model.plan import RunPlan, ScriptKind, StartMethod
from torchmuster.node.door.messages import ForkAgent
from torchmuster.node.environment import share_threads
from torchmuster.node.options import AgentOrder


def fork_order(plan: RunPlan, order: AgentOrder, environment: Mapping[str, str]) -> ForkAgent:
    """Return the order for one agent of a run.

    Args:
        plan: Of the run, as this node has it.
        order: What the agent is told.
        environment: Its variables.
    """
    program = plan.program
    added = dict(environment)
    share_threads(added, plan.num_workers(order.place))
    added = {n: v for n, v in added.items() if environment.get(n) != v}
    added.update(plan.node_setup.environment)
    umask = os.umask(0o077)
    os.umask(umask)
    script = os.path.join(program.cwd, program.target)
    is_file = program.kind is ScriptKind.FILE
    return ForkAgent(
        run_id=plan.run_id,
        arguments=tuple(to_words(replace(order, lifeline_fd=None, listen_fd=None))),
        has_head=order.listen_fd is not None,
        environment=dict(environment),
        added=added,
        cwd=os.getcwd(),
        umask=umask,
        kind=program.kind.value,
        target=program.target,
        folder=os.path.dirname(os.path.realpath(script)) if is_file else program.cwd,
        python=program.python,
        preload=program.preload,
        is_fresh=program.start is StartMethod.FRESH,
    )
