"""Training backends side by side on the same tokens."""
