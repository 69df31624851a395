"""Host access: routes and NAT between a node's host, the workloads of its tenants, and the world."""
