"""The fixed facts about Kubernetes; importing them loads no dialect, so they cost no start time."""

from torchmuster.launcher.model.scheduler import KeyKind, SchedulerFacts

KUBERNETES = SchedulerFacts(
    name="kubernetes",
    module="torchmuster.kubernetes.engine.dialect",
    install="kubectl, with a context that works: kubectl auth whoami",
    tools=("kubectl",),  # laptops have kubectl, so it marks no login node and is no `client`
    directive="",
    example="spec.template.spec.runtimeClassName=nvidia",
    queue_word="queue of Kueue",
    sees_files=False,
    own_keys={
        "context": KeyKind.LINE,
        "namespace": KeyKind.WORD,
        "image": KeyKind.WORD,
        "pull_policy": KeyKind.WORD,
        "pull_secrets": KeyKind.LINES,
        "memory": KeyKind.WORD,
        "shm": KeyKind.WORD,
        "scratch_size": KeyKind.WORD,
        "gpu_resource": KeyKind.WORD,
        "devices": KeyKind.PAIRS,
        "claims": KeyKind.LINES,
        "home": KeyKind.LINE,
        "node_selector": KeyKind.PAIRS,
        "tolerations": KeyKind.LINES,
        "priority_class": KeyKind.WORD,
        "queue_priority": KeyKind.WORD,
        "topology": KeyKind.WORD,
        "gang": KeyKind.WORD,
        "jobset": KeyKind.YES,
        "service_account": KeyKind.WORD,
        "pod_security": KeyKind.WORD,
        "run_as": KeyKind.COUNT,
        "host_network": KeyKind.YES,
        "lock_memory": KeyKind.YES,
        "door_port": KeyKind.COUNT,
        "take_within": KeyKind.WORD,
    },
    instead={
        "project": "Kubernetes has namespaces: `namespace`",
        "qos": "`priority_class` of the cluster, or `queue_priority` of Kueue",
        "constraint": 'node_selector = { "LABEL" = "VALUE" }',
        "start_with": "its pods start agents by themselves",
    },
    keys=frozenset(),
)
