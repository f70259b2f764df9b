"""Who calls: API keys, trusted proxies, and the identity that limits, routing and the audit go by."""
