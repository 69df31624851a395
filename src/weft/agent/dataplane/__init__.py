"""Desired state and apply loop: what the datapath must have, from store and attachments, and how it gets it."""
