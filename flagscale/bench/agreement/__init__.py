"""Whether our figures are those that nccl-tests would print: both measured by turns, in one run."""
