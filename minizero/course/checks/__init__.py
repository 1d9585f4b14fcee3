"""The checks of the exercises: one module for each notebook, named by its topic."""
