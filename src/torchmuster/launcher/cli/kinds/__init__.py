"""What commands do with each kind of record."""
