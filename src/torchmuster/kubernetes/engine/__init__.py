"""The Kubernetes dialect, purely functional: a run is an Indexed Job, a pod is a node."""
