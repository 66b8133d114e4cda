"""Several hosts: one process a host, of which the first decides alone and the others do what it says."""
