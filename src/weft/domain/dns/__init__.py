"""DNS zones of tenants: which records the objects of the cluster have. `weft.dns` serves them."""
