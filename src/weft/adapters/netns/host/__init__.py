"""Host access: connectivity between workloads, their host and the outside."""
