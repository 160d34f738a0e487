"""Small studies of one claim each, in seconds on one CPU thread."""
