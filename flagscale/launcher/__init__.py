"""From a checked experiment to running processes: plan, scripts, runners, state.

Planning and rendering are pure; only ``runners`` start and end processes, and ``query``, ``logs``
and ``stop`` read nothing but the run's state on disk. Nothing here imports torch.
"""
