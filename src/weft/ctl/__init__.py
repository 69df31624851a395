"""The command line: netctl, and the subcommands of `weft`.

Modules import lazily what is slow to import: netctl must start in well under 100 ms of CPU.
"""
