"""netmaster, the control plane: stores the objects, allocates addresses and tags, serves REST and the store."""
