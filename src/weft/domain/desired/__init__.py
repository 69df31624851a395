"""The desired state of a node: what its datapath must have, and differences between states."""
