"""What all tests share: how to wait, to get a port, to run `muster`, and to live in a world of one's own."""
