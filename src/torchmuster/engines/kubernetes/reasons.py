"""Kubernetes' reasons in sentences: why pods wait, what can't heal, and why kubectl refuses a command.

Source: kubernetes pkg/kubelet/images/types.go, pkg/kubelet/container/sync_result.go, pkg/apis/core/types.go (1.31 to 1.36), Kueue 0.19;
those marked "recorded" were seen from a real control plane.
"""

import os
import re
from dataclasses import replace

from torchmuster.engines.wait_reasons import WaitReasons, read_reasons
from torchmuster.model.verdict import Report

_TABLE, REFUSALS = read_reasons(
    os.path.join(os.path.dirname(__file__), "kubernetes.txt"), "{}(?![A-Za-z])"
)
REASONS = WaitReasons(
    table=_TABLE,
    parts_wait=True,
    capacity_argv=lambda job_id: [],
    shortage=lambda answers: None,
)

_FORBIDDEN = re.compile(
    r'cannot (?P<verb>\w+) resource "(?P<kind>[\w./-]+)" in API group "(?P<group>[\w.-]*)"'
)


def missing_rule(report: Report, stderr: str) -> Report:
    """Return the report on a refusal with the lines that the user's Role lacks, where the cluster names them."""
    rules = [
        f'{{apiGroups: ["{found["group"]}"], resources: ["{found["kind"]}"], verbs: ["{found["verb"]}"]}}'
        for found in _FORBIDDEN.finditer(stderr)
    ]
    if not rules:
        return report
    words = " and ".join(dict.fromkeys(rules))
    return replace(
        report, hint=f"the Role of the namespace lacks {words}; docs/kubernetes.md has it whole"
    )
