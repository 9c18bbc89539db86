"""The numbers of a run: values, moments and gradients, and the compiled loops that update them."""
