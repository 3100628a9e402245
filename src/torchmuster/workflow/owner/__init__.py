"""The owner of a workflow: groups here, on ssh hosts or as jobs; their resources and views."""
