"""Host side of the project: checks, plans, starts and stops what serves the model. Standard library only."""
