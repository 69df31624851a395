"""A real Kubernetes for tests, with binaries of `scripts/build-kubernetes` (docs/design/kubernetes.md)."""
