"""Netlink: codec and socket, and one module per protocol family (link, route, neigh, tc, conntrack, nflog, nft_set)."""
