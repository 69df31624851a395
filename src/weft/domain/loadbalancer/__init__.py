"""Load balancing of Contiv services and Kubernetes Services: frontends, their backends, and session affinity.

See docs/design/services.md.
"""
