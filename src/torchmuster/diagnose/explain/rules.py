"""All rules. Each looks at the whole case for one mechanism and argues it, or says nothing.

A rule that rests on a line of a cause is worth more than one that rests on an absence; what others only echo is
never a cause. Weights are in `weigh.Weight`, so that they can be compared in one place.
"""

from torchmuster.diagnose.explain import (
    rules_collective,
    rules_launch,
    rules_network,
    rules_program,
    rules_said,
    rules_scheduler,
    rules_signals,
    rules_start,
    rules_store,
    rules_system,
)
from torchmuster.diagnose.explain.weigh import Rule

RULES: tuple[Rule, ...] = (
    rules_scheduler.time_limit,
    rules_scheduler.ended_by_scheduler,
    rules_scheduler.killed_by_pbs,
    rules_scheduler.cancelled,
    rules_start.could_not_start,
    rules_launch.launcher_on_too_few_nodes,
    rules_launch.rendezvous_differs,
    rules_launch.endpoint_ignored,
    rules_launch.node_ranks,
    rules_launch.never_joined,
    rules_launch.rendezvous_closed,
    rules_network.port_taken,
    rules_network.loopback_endpoint,
    rules_network.bridge_address,
    rules_network.link_local,
    rules_network.names,
    rules_network.misspelled_name,
    rules_store.cannot_reach_store,
    rules_said.said_itself,
    rules_said.wrong_provider,
    rules_said.nccl_warnings,
    rules_system.system_errors,
    rules_program.exceptions,
    rules_program.exit_codes,
    rules_signals.out_of_memory,
    rules_signals.signals,
    rules_signals.ended_from_outside,
    rules_signals.interrupted,
    rules_collective.stuck_collective,
    rules_collective.watchdog_stuck,
    rules_collective.ended_early,
    rules_collective.ended_beside,
    rules_collective.only_echoes,
)
