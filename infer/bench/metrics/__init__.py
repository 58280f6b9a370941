"""What completions are worth: ``infer.bench --metric NAME[:ARG]``, a file for each."""
