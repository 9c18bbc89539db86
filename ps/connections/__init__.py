"""Who is at the other end: connections, from the door to the last goodbye."""
