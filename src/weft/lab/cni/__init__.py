"""A container runtime's side of CNI: calls plugins as libcni does, and keeps its result cache."""
