"""Workflows, groups of tasks from a file.

`spec` the format, parsed and checked; `plan` what becomes of it; `owner` starts groups when their inputs exist; `head`
the head of one group; `task` the agent of one task; `sandbox` what a task sees; `data` datasets and transfers; `jobs`
groups as jobs of a scheduler; `cli` the commands.
"""
