"""The Datapath on Open vSwitch: its database, its flows, and the node's parts said in them.

What every Linux machine has (devices, namespaces, addresses) is spoken in the words of `weft.adapters.linux`.
"""
