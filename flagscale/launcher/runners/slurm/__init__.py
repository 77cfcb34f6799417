"""Runner for Slurm: one job per run, in which srun starts the agent of every node.

- ``job``: the job that is submitted (pure functions)
- ``scheduler``: Slurm's commands and the parsing of their output
- ``files``: files that a job writes into the run's directory
- ``watch``: status of a job
- ``checks``: reasons for which Slurm would reject a job or let it wait forever
- ``container``: the container that each node's script runs in (pure functions)
- ``reasons``: explanations of Slurm's pending reasons (pure functions)
- ``runner``: the runner
"""
