"""The numbers of a run, in memory: values, moments and gradients, and the compiled loops that update them."""
