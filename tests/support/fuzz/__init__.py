"""Byte fuzzers for every parser of foreign bytes: `python -m tests.support.fuzz --help`."""
