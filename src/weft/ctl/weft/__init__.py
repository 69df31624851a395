"""The subcommands of `weft` that work on a node: doctor, drops, trace, capture, shell and up."""
