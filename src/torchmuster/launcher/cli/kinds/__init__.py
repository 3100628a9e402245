"""How commands handle each kind of record."""
