"""Runs as jobs of Slurm's: one job a run, in which srun starts the agent of every node.

``job`` (what is submitted; pure) · ``scheduler`` (Slurm's commands and what they answer) ·
``files`` (what a job says in the run's directory) · ``watch`` (how a job stands) · ``checks`` (what
Slurm would refuse, or let wait for ever) · ``runner`` (the verbs).
"""
