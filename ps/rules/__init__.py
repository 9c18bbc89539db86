"""What each gradient counts: the rules, what they remember of the workers, and the master network."""
