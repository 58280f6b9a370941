"""The embedded demo models and the functions that show them."""
