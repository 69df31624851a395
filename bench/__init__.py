"""Every performance figure, with its peer beside it: `make bench`, or `make bench BENCH=part` for one part."""
