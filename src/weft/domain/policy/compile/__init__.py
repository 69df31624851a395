"""Compilers from policy APIs to the common rule form: Contiv policies and Kubernetes NetworkPolicies."""
