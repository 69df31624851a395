"""The ports, carried out on real systems. Adapters never import each other."""
