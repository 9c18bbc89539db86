"""The parameter server: it owns the variables and is the only place where they are updated."""
