"""The node's state: attachment records and their log on disk, and what the node keeps in the store.

The store has the node's lease, address blocks and endpoints.
"""
