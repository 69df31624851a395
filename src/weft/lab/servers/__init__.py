"""The servers of a lab, as child processes: netmaster, etcd, Open vSwitch, and certificates for them."""
