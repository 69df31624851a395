"""Connections to the daemons of Open vSwitch, and what they are asked: unixctl, ofproto/trace, packet-in, health."""
