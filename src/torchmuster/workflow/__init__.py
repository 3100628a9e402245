"""Workflows: groups of tasks from a file, and the data that they read and write.

`spec` the file, checked and compiled to a `plan`; `owner` starts groups; `head` one group; `task` the agent of one task;
`sandbox` the files and the network that its command sees; `data` data sets and checkpoints; `cli` commands; `jobs`
groups as jobs of a scheduler; `task_call` what a task's program asks.
"""
