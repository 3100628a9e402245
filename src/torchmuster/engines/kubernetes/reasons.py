"""Kubernetes' reasons in sentences: why pods wait, what can't heal, and why kubectl refuses a command.

Source: kubernetes pkg/kubelet/images/types.go, pkg/kubelet/container/sync_result.go, pkg/apis/core/types.go (1.31 to 1.36), Kueue 0.19;
those marked "recorded" were seen from a real control plane.
"""

import os
import re
from dataclasses import replace

from torchmuster.engines.wait_reasons import WaitReasons, read_words
from torchmuster.model.verdict import Report

_WORDS = read_words(os.path.join(os.path.dirname(__file__), "kubernetes.txt"), "{}(?![A-Za-z])")
REFUSALS = _WORDS.refuses
REASONS = WaitReasons(
    table=_WORDS.waits,
    parts_wait=True,
    capacity_argv=lambda job_id: [],
    shortage=lambda answers: None,
)

_FORBIDDEN = re.compile(
    r'cannot (?P<verb>\w+) resource "(?P<kind>[\w./-]+)" in API group "(?P<group>[\w.-]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]*)")?'
)


def missing_rule(report: Report, stderr: str) -> Report:
    """Return the report on a refusal with the lines that the user's Role lacks, where the cluster names them."""
    found = list(_FORBIDDEN.finditer(stderr))
    rules = [
        f'{{apiGroups: ["{one["group"]}"], resources: ["{one["kind"]}"], verbs: ["{one["verb"]}"]}}'
        for one in found
    ]
    if not rules:
        return report
    words = " and ".join(dict.fromkeys(rules))
    names = {one["namespace"] for one in found if one["namespace"]}
    # A namespace that does not exist is forbidden, too.
    where = f" {names.pop()}, if that is its name," if len(names) == 1 else ""
    return replace(
        report,
        hint=f"the Role of the namespace{where} lacks {words}; docs/kubernetes.md has it whole",
    )
