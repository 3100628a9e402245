"""What any process can see and ask of runs: find, show, control, clean up."""
