"""What is kept on the disk of a run, so that it can go on to the bit; and how it is written and read."""
