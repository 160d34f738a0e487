"""What of its history a run goes back to: pure float64 functions, no storage, no settings."""
