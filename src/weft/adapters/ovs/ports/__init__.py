"""OVS ports and their kernel devices: plug and unplug, the pre-provisioned pool, reconciliation, and GARP."""
