"""What the core needs of the outside world, as Protocols whose docstrings are the contract."""
