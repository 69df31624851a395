"""Clients of a store: mirror, commit loop, leases, election, presence; and building blocks of store adapters."""
