"""The linux kernel: namespaces, rtnetlink, nf_tables and conntrack, without commands and without forks.

Everything here blocks and belongs to one thread at a time: the agent has a thread of its own for kernel work. Modules
from below: `wire` (pure framing), `netns`, `netlink` (the socket), then one module per kind of kernel object.
"""
