"""A run on several processes: mesh, process groups, the control reduction, failures."""
