"""What was asked and what it took: a line a request in the audit file, and sums per user, key and model."""
