"""Updates from files: the folder in which they appear, and their formats."""
