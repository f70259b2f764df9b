"""Ways to run a process of the fleet."""
