"""Checks of a run by itself: before its first step, and of the weights in the engine later."""
