"""Benchmarks, each compared with a peer: `make bench`, or `make bench BENCH=part` for one part."""
