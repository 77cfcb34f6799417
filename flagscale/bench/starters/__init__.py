"""Starters of ranks: on this host, over SSH, by mpirun, inside Slurm."""
