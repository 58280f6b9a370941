"""Decode with any method, one prompt or a job."""
