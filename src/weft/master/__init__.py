"""netmaster: the control plane. Keeps the objects, gives out addresses and tags, answers REST."""
