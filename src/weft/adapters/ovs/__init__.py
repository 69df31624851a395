"""The Datapath on Open vSwitch: OVSDB, OpenFlow, the flow pipeline and ports.

The kernel does NAT, services and host access in tenant netns, by the code of `weft.adapters.netns`, as on linux.
"""
