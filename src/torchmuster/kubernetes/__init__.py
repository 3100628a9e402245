"""Runs, workflow groups and sweeps in Kubernetes pods.

`engine` holds the dialect, manifests and answers as text; `pods` the client's side; `firstpod` the
owners in the first pod; `node` what runs in every pod; `cli` the commands.
"""
