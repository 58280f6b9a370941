"""lm-evaluation-harness with specjax's methods."""
