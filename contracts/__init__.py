"""What the gateway and the worker agree on: option names, error bodies, header names, units.

This package imports neither of them, and neither torch nor anything slow.
"""
