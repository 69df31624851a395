"""The pure core: values and decisions. No I/O, no clock, no logging; msgspec is the only library."""
