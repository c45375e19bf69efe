"""Makes the small EXL3 model of the local topology, and random ones for tests."""
