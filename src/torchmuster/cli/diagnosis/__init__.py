"""The commands that look: at nodes, logs, job scripts, engines."""
