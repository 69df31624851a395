"""netctl and weft: the command line. Imports little, so that it answers in well under 100 ms of CPU."""
