"""The nftables rules of a tenant netns; docs/reference/nft-tables.md lists their chains, sets and maps."""
