"""The linux datapath: `weft.ports.datapath.Datapath` on the plain kernel, without a switch."""
