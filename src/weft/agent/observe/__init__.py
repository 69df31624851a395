"""What operators see of a node: readiness, sync status, drops, counters, traces and health check ports."""
