"""lm-evaluation-harness with any method of specjax."""
