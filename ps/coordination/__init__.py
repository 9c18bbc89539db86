"""What follows from each event of a run: pure objects, events in and instructions out, time as an argument."""
