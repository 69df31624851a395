"""Process infrastructure without domain knowledge: asyncio tasks, HTTP, TLS, logging, settings, and store clients."""
