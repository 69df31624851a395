"""Stores, one contract suite (`weft.testing.store_contract`) for all."""
