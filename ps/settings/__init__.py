"""What a run is asked to be: options, typed and checked, and what the machine has for them."""
