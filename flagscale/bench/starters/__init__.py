"""Starting a command's ranks on other hosts: over SSH, by mpirun, inside Slurm."""
