"""IPAM: which address of a network an endpoint or service gets, by individual claims and by per-node blocks (ADR 2)."""
