"""Kubernetes: a run is an Indexed Job, a pod is a node. Pure: values in, objects and argv out, answers in, values out."""
