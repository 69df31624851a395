"""netdns: the names of each tenant on a node, answered by a process of its own that outlives the agent's restarts."""
