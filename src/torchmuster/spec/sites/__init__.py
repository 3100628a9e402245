"""The user's clusters and hosts: `muster.toml` and host files."""
