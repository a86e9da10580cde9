"""What the layers of all frameworks share: nodes by name, and lookups in a table of one. No framework."""
