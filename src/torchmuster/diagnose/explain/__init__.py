"""Root causes from logs: read lines, make events of them, weigh what they say, give one verdict.

    sources -> scan (patterns, tracebacks) -> case -> rows and rules -> judge

Standard library only; pure from `case` on. Nothing here knows who started the job.
"""
