"""Kubernetes adapter: API client, informers (list and watch), Events, discovery (docs/design/kubernetes.md)."""
