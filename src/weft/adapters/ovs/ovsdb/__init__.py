"""OVSDB: a client of ovsdb-server, and our bridges, ports and uplinks in its database."""
