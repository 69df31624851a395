"""Tenant network namespaces, pod namespaces and host access, by rtnetlink, nf_tables and conntrack.

Both datapaths build on it: `linux` does everything here, `ovs` uses it for services and host access. All of it blocks
and belongs to one thread at a time.
"""
