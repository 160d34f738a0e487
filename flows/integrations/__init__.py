"""Other trainers' runs in our event log."""
