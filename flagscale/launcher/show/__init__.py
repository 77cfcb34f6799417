"""What people see of plans, checks and runs: tables, the live view, the progress bar."""
