"""Constants of the kernel's user-space API by the names of its headers, one module per protocol.

A unit test compares each of them with the installed headers.
"""
