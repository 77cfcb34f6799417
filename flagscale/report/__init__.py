"""Self-contained HTML pages of runs, and the building blocks of such pages."""
