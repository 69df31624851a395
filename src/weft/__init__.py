"""Weft: multi-tenant, policy-driven container networking.

This module imports nothing, so that the command line and the CNI program start fast.
"""

__version__ = "0.1.0"
