"""The host beside its tenants: how it reaches their workloads, and how they reach it and the world."""
