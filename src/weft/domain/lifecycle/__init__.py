"""Life cycle of objects and nodes: changes of each kind, node GC, node permissions, realization, store format."""
