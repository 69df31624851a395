"""Contract suites for adapters, shipped so that adapters outside this tree can run them (extra `weft[testing]`)."""
