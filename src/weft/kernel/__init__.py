"""Access to the kernel that the datapaths, DNS and the lab share: netlink, nftables and network namespaces."""
