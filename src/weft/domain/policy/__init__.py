"""Network policy: Contiv rules and Kubernetes NetworkPolicies, compiled to one rule form, evaluated and explained.

Read `model.rules` first (the common rule form), then `engine.decide` (precedence), `compile` (from each API to rules),
`engine` (state and incremental updates), `policymap` (lookup tables for datapaths) and `explain` (trace and diff).
"""
