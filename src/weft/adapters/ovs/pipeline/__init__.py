"""The OpenFlow pipeline: desired state as flows and meters (pure), and `FlowTable`, which syncs them to OVS."""
