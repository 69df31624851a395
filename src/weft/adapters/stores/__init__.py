"""Store adapters; one contract suite (`weft.testing.store_contract`) tests all of them."""
