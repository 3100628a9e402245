"""Owners of runs and workflow groups in the first pod; they reach the others by sessions."""
