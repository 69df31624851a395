"""Netlink itself: `linux/netlink.h`, and the socket options it needs from `asm/socket.h`."""

from __future__ import annotations

NETLINK_ROUTE = 0
NETLINK_NETFILTER = 12

# Message types below NLMSG_MIN_TYPE (0x10) belong to netlink; all others to the protocol.
NLMSG_ERROR = 2
NLMSG_DONE = 3

NLM_F_REQUEST = 0x1
NLM_F_ACK = 0x4
NLM_F_DUMP_INTR = 0x10
# Modifiers of GET requests, of NEW requests and of acknowledgements share bits.
NLM_F_DUMP = 0x300
NLM_F_REPLACE = 0x100
NLM_F_EXCL = 0x200
NLM_F_CREATE = 0x400
NLM_F_APPEND = 0x800
NLM_F_CAPPED = 0x100
NLM_F_ACK_TLVS = 0x200

NLMSGERR_ATTR_MSG = 1

NLA_F_NESTED = 0x8000
# The two highest bits are flags (nested, network byte order).
NLA_TYPE_MASK = 0x3FFF

SOL_NETLINK = 270
NETLINK_ADD_MEMBERSHIP = 1
NETLINK_CAP_ACK = 10
NETLINK_EXT_ACK = 11
NETLINK_GET_STRICT_CHK = 12
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33
