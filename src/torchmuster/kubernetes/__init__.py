"""Kubernetes: runs, groups and sweeps in pods.

`engine` the dialect, manifests and answers as text; `pods` the client's side; `firstpod` owners in the first pod;
`node` what runs in every pod; `cli` commands.
"""
