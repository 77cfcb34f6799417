"""Background traffic between hosts, calibrated to a tail latency."""
