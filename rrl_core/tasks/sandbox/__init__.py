"""Child processes that can be ended: for untrusted code, and for checkers that may hang."""
