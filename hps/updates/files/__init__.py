"""Updates by way of files: a folder in which they appear, and what is in them."""
