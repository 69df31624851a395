"""`weft verify`: compares policy verdicts with a table of expected ones.

The verdicts come from the policy engine, or from packets sent through a real datapath.
"""
