"""Connection tracking: `linux/netfilter/nfnetlink.h`, `netfilter/nfnetlink_conntrack.h`."""

from __future__ import annotations

NFNL_SUBSYS_CTNETLINK = 1
IPCTNL_MSG_CT_GET = 1
IPCTNL_MSG_CT_DELETE = 2

CTA_TUPLE_ORIG = 1
CTA_TUPLE_REPLY = 2
CTA_ID = 12
CTA_ZONE = 18
CTA_FILTER = 25

CTA_TUPLE_IP = 1
CTA_TUPLE_PROTO = 2
CTA_IP_V4_SRC = 1
CTA_IP_V4_DST = 2
CTA_IP_V6_SRC = 3
CTA_IP_V6_DST = 4
CTA_PROTO_NUM = 1
CTA_PROTO_SRC_PORT = 2
CTA_PROTO_DST_PORT = 3

# What of a tuple CTA_FILTER compares. The kernel has these in `nf_internals.h`, not in its UAPI headers.
CTA_FILTER_F_CTA_IP_SRC = 0x01
CTA_FILTER_F_CTA_IP_DST = 0x02
CTA_FILTER_F_CTA_PROTO_NUM = 0x08
CTA_FILTER_F_CTA_PROTO_SRC_PORT = 0x10
CTA_FILTER_F_CTA_PROTO_DST_PORT = 0x20
