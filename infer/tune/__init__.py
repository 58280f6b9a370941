"""Choose CDSL's thresholds on a validation task."""
