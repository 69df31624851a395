"""Policy values: rules, identities, NetworkPolicy objects, protocols, and address sets."""
