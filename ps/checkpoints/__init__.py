"""What is kept on the disk of a run, so that it goes on with the same bits; and how it is written and read."""
