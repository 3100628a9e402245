"""What Kubernetes adds to the plug points."""

PLUGS = {
    "programs": {
        "pod": "kubernetes.node.serve:main",
        "call": "kubernetes.node.call:main",
        "pod-warm": "kubernetes.node.warm:main",
        "pod-record": "kubernetes.node.record:send_record",
        "pod-keep": "kubernetes.node.record:keep_files",
        "pod-place": "kubernetes.node.record:place_group",
        "pod-task": "kubernetes.node.task:main",
        "conduct-pods": "kubernetes.firstpod.conduct:main",
        "conduct-group-pods": "kubernetes.firstpod.conduct_group:main",
    },
    "job_places": {
        "objects": "kubernetes.cli:PodsPlace",
        "again": "kubernetes.cli:pods_again",
    },
    "cells": {
        "sweep pods": "kubernetes.cli:SweepInPods",
        "workflow pods": "kubernetes.cli:GroupsInPods",
    },
    "elsewhere": {"pods": "kubernetes.elsewhere:RecordsInPods"},
    "run_owners": {"member": "kubernetes.pods.members:own_member"},
    "workflow_places": {"cluster": "kubernetes.pods.group:cluster_of"},
    "arrays": {"objects": "kubernetes.pods.members:MemberPods"},
    "task_engines": {"pods": "kubernetes.firstpod.conduct:engine_of_task"},
    "host_names": {"pod": "kubernetes.node.order:own_host"},
    "schedulers": {"kubernetes": "kubernetes.engine.facts:KUBERNETES"},
    "travels": {
        "kubernetes/elsewhere.py": "owners in pods, and the calls, look at records in pods",
        "kubernetes/engine": "owners in pods ask their cluster",
        "kubernetes/firstpod": "owns runs and groups in the first pod",
        "kubernetes/node": "runs in every pod",
        "kubernetes/pods": "owners in pods ask their cluster",
    },
}
