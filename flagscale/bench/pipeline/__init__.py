"""fsccl's pipelined schedules, measured over their parameters."""
