"""Services: one address that balances over many, whoever describes them (docs/design/services.md)."""
