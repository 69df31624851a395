"""A real Kubernetes for tests, from programs that `scripts/build-kubernetes` has built (docs/design/kubernetes.md)."""
