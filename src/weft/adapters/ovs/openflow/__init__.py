"""OpenFlow 1.4 with Open vSwitch's extensions: constants, match fields, actions, flows, meters and the client."""
