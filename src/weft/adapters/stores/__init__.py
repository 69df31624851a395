"""Stores, one contract suite (`weft.testing.contracts`) for all."""
