"""The pure core: values and decisions, without I/O, clock or logging. msgspec is its only library."""
