"""netctl: the command table, its parser, the actions, and the reference page."""
