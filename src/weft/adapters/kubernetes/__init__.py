"""Kubernetes: its API as a list and a watch, and what it says as values of ours (docs/design/kubernetes.md)."""
