"""The leader's controllers: object changes, node GC, Kubernetes sync and policy status."""
