"""netdns: the DNS server of a node. It listens in each tenant's netns and keeps answering while the agent restarts."""
