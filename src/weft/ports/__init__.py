"""Ports: the Protocols that the core requires of datapaths, orchestrators and stores. Docstrings are the contract."""
