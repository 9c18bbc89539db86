"""What people see of a run: console, log, status page, metrics, TensorBoard."""
