"""The machine's own network stack does not hear what ports of the switch say.

With the userspace datapath the switch listens at devices of the machine, whose kernel hears everything too: it would
answer ARP for its own addresses, take packets for itself and forward others past the switch. So one table refuses
what comes from our devices, by their names. Where the kernel forwards for the switch no packet ever meets it.
"""

from __future__ import annotations

from weft.adapters.netns.nft.policy_chains import OVERLAY_PREFIX, PORT_PREFIX
from weft.adapters.ovs.pipeline.tenant_netns_flows import LEG_PREFIX

_TABLE = "weft_ovs"
# Where each family of packets is met first.
_HOOKS = {"inet": "prerouting", "arp": "input"}


def _commands(family: str, hook: str) -> list[str]:
    chain = f"{family} {_TABLE} arrival"
    return [
        f"add table {family} {_TABLE}",
        f"add chain {chain} {{ type filter hook {hook} priority -400; }}",
        f"flush chain {chain}",
        *(f'add rule {chain} iifname "{prefix}*" drop' for prefix in (PORT_PREFIX, OVERLAY_PREFIX, LEG_PREFIX)),
    ]


# The commands that make the tables, whatever is there of them.
GUARD = "\n".join(line for family, hook in _HOOKS.items() for line in _commands(family, hook)) + "\n"

# Those that take them away, gone already or not.
UNGUARD = "".join(f"add table {family} {_TABLE}\ndelete table {family} {_TABLE}\n" for family in _HOOKS)
