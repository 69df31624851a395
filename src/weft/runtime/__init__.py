"""Asyncio plumbing that knows nothing of networks."""
