"""Contract suites, judges and labs, shipped so that adapters outside this tree can be judged too."""
