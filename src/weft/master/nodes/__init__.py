"""Node-facing part of netmaster: store server, authentication and authorization of nodes, enrollment."""
