"""A real Kubernetes of two nodes in namespaces, from one folder of programs, and what is proved on it."""
