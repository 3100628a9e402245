"""What can be found out about nodes, jobs, job scripts and failures."""
