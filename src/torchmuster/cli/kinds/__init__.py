"""What `status`, `logs`, `restart` and `replay` show and do of each kind of record."""
