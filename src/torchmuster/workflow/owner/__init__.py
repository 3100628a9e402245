"""The owner of a workflow, and its views."""
