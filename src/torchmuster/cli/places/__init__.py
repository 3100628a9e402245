"""Where what is started runs: this machine, the job around us, hosts of ssh, a scheduler, a cluster of pods, a session."""
